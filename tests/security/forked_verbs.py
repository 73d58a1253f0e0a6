"""One user's `orch`: a process with all verbs imported, which runs each as a fork.

It reads JSON lines {words, environ, out, err} from stdin, and answers with the exit code of each.
"""

import importlib
import json
import os
import sys
from functools import partial
from typing import Any

from orchestrator.cli.main import VERBS, run
from tests.warm_root import as_program, become


def _begin(order: dict[str, Any]) -> None:
    streams = [os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for name in ("out", "err")]
    become(order["environ"], (os.open(os.devnull, os.O_RDONLY), *streams))
    sys.argv = ["orch", *order["words"]]
    sys.exit(run())


def main() -> None:
    for target, _ in VERBS.values():
        importlib.import_module(f"orchestrator.cli.{target.partition(':')[0]}")
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            as_program(partial(_begin, json.loads(line)))
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
