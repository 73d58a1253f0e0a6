"""A training script of the standard library only: notes who it is, counts a little, and does what it is told.

Usage: stand_in.py [WHAT@RANK@GENERATION ...] where WHAT is one of exit:N, kill, hang, child, deaf, trap.
"""

import json
import os
import signal
import subprocess
import sys
import time

NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "ORCH_RUN", "ORCH_ATTEMPT", "ORCH_GENERATION", "ORCH_RUN_DIR", "COLOR",
)  # fmt: skip


def note(**fields: object) -> None:
    path = os.path.join(os.environ["ORCH_RUN_DIR"], "notes.jsonl")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    rank, generation = int(os.environ["RANK"]), int(os.environ["ORCH_GENERATION"])
    line = {"rank": rank, "generation": generation, "pid": os.getpid(), "time": time.time(), **fields}
    os.write(descriptor, (json.dumps(line) + "\n").encode())
    os.close(descriptor)


def act(what: str) -> None:
    if what.startswith("exit:"):
        sys.exit(int(what.partition(":")[2]))
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        escaped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
        note(children=[child.pid, escaped.pid])
        time.sleep(120)
    elif what == "hang":
        time.sleep(120)
    elif what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(deaf=True)
        time.sleep(120)
    elif what == "trap":
        signal.signal(signal.SIGTERM, lambda *_: (note(saved=True), sys.exit(0)))
        note(trapped=True)
        time.sleep(120)


def main() -> None:
    note(
        started=True,
        cwd=os.getcwd(),
        env={name: os.environ.get(name) for name in NAMES},
        ignored=[number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN],
        group=os.getpgrp() == os.getpid(),
        cores=sorted(os.sched_getaffinity(0)),
    )
    sys.stdout.write(f"hello from rank {os.environ['RANK']}\n")
    for order in sys.argv[1:]:
        what, rank, generation = order.split("@")
        if rank in ("*", os.environ["RANK"]) and generation in ("*", os.environ["ORCH_GENERATION"]):
            act(what)


if __name__ == "__main__":
    main()
