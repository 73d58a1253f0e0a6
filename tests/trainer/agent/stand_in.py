"""A training script of the standard library only: notes who it is, counts a little, and does what it is told.

Usage: stand_in.py [WHAT@RANK@GENERATION ...] where WHAT is one of exit:N, kill, kill:NOTE,..., hang, child, deaf, trap;
kill:deaf,trapped waits until both have been noted.
It starts hundreds of times, and imports nothing that Python has not imported already: `json` or `signal` would take
twice as long as all the rest.
"""

import _signal as signal
import os
import sys
import time

NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "ORCH_RUN", "ORCH_ATTEMPT", "ORCH_GENERATION", "ORCH_RUN_DIR", "COLOR",
)  # fmt: skip


def as_json(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_json(name)}: {as_json(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_json, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "null" if value is None else str(value).lower()


def note(**fields: object) -> None:
    path = os.path.join(os.environ["ORCH_RUN_DIR"], "notes.jsonl")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    rank, generation = int(os.environ["RANK"]), int(os.environ["ORCH_GENERATION"])
    line = {"rank": rank, "generation": generation, "pid": os.getpid(), "time": time.time(), **fields}
    os.write(descriptor, (as_json(line) + "\n").encode())
    os.close(descriptor)


def wait_for_notes(names: list[str]) -> None:
    path = os.path.join(os.environ["ORCH_RUN_DIR"], "notes.jsonl")
    while True:
        with open(path) as file:
            noted = file.read()
        if all(f'"{name}": true' in noted for name in names):
            return
        time.sleep(0.01)


def act(what: str) -> None:
    if what.startswith("exit:"):
        sys.exit(int(what.partition(":")[2]))
    elif what.startswith("kill"):
        wait_for_notes([name for name in what.partition(":")[2].split(",") if name])
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "child":
        note(children=[os.posix_spawnp("sleep", ["sleep", "120"], os.environ, setsid=apart) for apart in (False, True)])
        time.sleep(120)
    elif what == "hang":
        time.sleep(120)
    elif what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(deaf=True)
        time.sleep(120)
    elif what.startswith("trap"):
        number = getattr(signal, what.partition(":")[2] or "SIGTERM")
        signal.signal(number, lambda *_: (note(saved=True), sys.exit(0)))
        note(trapped=True)
        time.sleep(120)


def main() -> None:
    note(
        started=True,
        cwd=os.getcwd(),
        env={name: os.environ.get(name) for name in NAMES},
        ignored=[
            name
            for name in dir(signal)
            if name.startswith("SIG") and name[3] != "_" and signal.getsignal(getattr(signal, name)) == signal.SIG_IGN
        ],
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
