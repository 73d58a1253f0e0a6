"""Jobs whose agents are programs, but whose fork servers are forks of a process that has imported torch.

Importing it takes five CPU seconds on every node in every attempt. As a program, this is the agent.
"""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.end_to_end.user import User
from tests.trainer.agent.warm_agents import WarmAgent
from tests.warm_children import order_program
from trainer.agent import main as agent
from trainer.agent.fork_server import server
from trainer.agent.fork_server.link import ForkServerLink
from trainer.protocol.run_dir import AttemptDir

QUIET = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables that ForkServerLink sets, because a process with threads must not fork."""
NAME = "tests.slurm.warm_fork_servers"
PYTHON = """#!/bin/sh
[ "$1 $2 $3 $4" = "-P -u -m trainer.agent.main" ] || exit 2
shift 4
export PYTHONPATH={root} WARM_CHILDREN={orders}
exec {python} -P -u -m {program} "$@"
"""


def warm_python(user: User, orders: str = "") -> str:
    """Return the override for a run of this user; other interpreters would start a cold fork server.

    `orders`: socket to use if the user's other processes are programs.
    """
    place = user.folder / "warm-python"
    place.write_text(
        PYTHON.format(
            root=Path(__file__).resolve().parents[2], orders=orders or user.environment["WARM_CHILDREN"],
            python=sys.executable, program=NAME,
        )
    )  # fmt: skip
    place.chmod(0o755)
    return f"cluster.python={place}"


def _start(
    python: str, theirs: socket.socket, attempt: AttemptDir, environ: Mapping[str, str], output: int
) -> WarmAgent:
    """Replacement of ForkServerLink's method, with this process's own Python."""
    words = ["PARENT", str(attempt.path)]
    with open(os.devnull) as nothing:
        streams = [nothing.fileno(), output, output]
        return order_program(NAME, words, {**environ, **QUIET}, streams, theirs.fileno())


def main(arguments: list[str]) -> None:
    """Run as a fork server with the import path of its environment, like a new process."""
    sys.path += [place for place in os.environ.get("PYTHONPATH", "").split(":") if place not in ["", *sys.path]]
    if sys.modules.get("numpy", server) is None:  # the warm root's torch does without, a program may have its own
        del sys.modules["numpy"]
    server.main(arguments)


if __name__ == "__main__":
    ForkServerLink._start = staticmethod(_start)  # type: ignore[assignment]
    sys.exit(agent.main(sys.argv[1:]))
