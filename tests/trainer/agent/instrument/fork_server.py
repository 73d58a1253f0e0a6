"""Server that imports torch once and forks a process for each program.

A request is a line of JSON with `code`, `before` (run before the start-up module), `environ`, `startup` and the files
`output` and `errors`. The answer is the exit status.
"""

import gc
import json
import os
import runpy
import sys
import traceback
from typing import Any

import torch  # noqa: F401  # what the programs import
import torch._dynamo  # noqa: F401
import torch.distributed  # noqa: F401
import torch.utils.data  # noqa: F401


def main() -> None:
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(_run(request))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run(request: dict[str, Any]) -> int:
    for name, place in ((1, "output"), (2, "errors")):
        os.dup2(os.open(request[place], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), name)
    os.environ.clear()
    os.environ.update(request["environ"])
    try:
        names = {"__name__": "__main__"}
        exec(compile(request["before"], "<before>", "exec"), names)
        runpy.run_path(request["startup"])
        exec(compile(request["code"], "<program>", "exec"), names)
    except BaseException:  # noqa: BLE001  # outermost edge of the program
        traceback.print_exc()
        return 1
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    return 0


if __name__ == "__main__":
    main()
