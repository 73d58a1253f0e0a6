"""Jobs on Slurm whose agents are the real ones, but whose fork servers are forks of a process that has imported torch.

To import it anew takes five CPU seconds on every node in every attempt. Run as a program this is the agent.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.end_to_end.user import User
from tests.trainer.agent.warm_agents import WarmAgent
from tests.warm_root import MOST
from trainer.agent import main as agent
from trainer.agent.fork_server.link import ForkServerLink
from trainer.contract.run_dir import AttemptDir

PYTHON = """#!/bin/sh
[ "$1 $2 $3 $4" = "-P -u -m trainer.agent.main" ] || exit 2
shift 4
export PYTHONPATH={root} WARM_CHILDREN={orders}
exec {python} -P -u -m {program} "$@"
"""


def warm_python(user: User) -> str:
    """Override of a run of this user; other interpreters would start the same agent with a cold fork server."""
    place = user.folder / "warm-python"
    place.write_text(
        PYTHON.format(
            root=Path(__file__).resolve().parents[2], orders=user.environment["WARM_CHILDREN"], python=sys.executable,
            program=__name__,
        )
    )  # fmt: skip
    place.chmod(0o755)
    return f"cluster.python={place}"


def _order(theirs: socket.socket, attempt: AttemptDir, environ: Mapping[str, str], output: int) -> WarmAgent:
    """In the place of ForkServerLink's own."""
    status, told = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
        link.settimeout(30)
        link.connect(os.environ["WARM_CHILDREN"])
        order = json.dumps(["fork server", dict(environ), str(attempt.path), os.getpid()])
        socket.send_fds(link, [order.encode()], [theirs.fileno(), output, told])
        os.close(told)
        return WarmAgent(int(link.recv(64)), status)


if __name__ == "__main__":
    ForkServerLink._start = staticmethod(_order)  # type: ignore[assignment]
    sys.exit(agent.main(sys.argv[1:]))
