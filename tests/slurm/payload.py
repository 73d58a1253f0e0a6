"""Payloads of trivial jobs, called in place of an agent."""

import json
import os
import signal
import time
from pathlib import Path


def record(run_dir: str, attempt: str) -> None:
    """Write one file per node, then wait until `stop` appears in the run directory."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it; an agent does not
    node = os.environ.get("SLURM_NODEID", os.environ.get("SUBMITIT_LOCAL_GLOBALID", "?"))
    folder = Path(run_dir)
    facts = {"attempt": attempt, "pid": os.getpid(), "environ": dict(os.environ), "cwd": os.getcwd()}
    temporary = folder / f".started-{node}"
    temporary.write_text(json.dumps(facts))
    temporary.rename(folder / f"started-{node}.json")
    deadline = time.monotonic() + 120
    while not (folder / "stop").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def fail(run_dir: str, attempt: str) -> None:
    """Exit with the code in the file `code`."""
    raise SystemExit(int((Path(run_dir) / "code").read_text()))


def note_warning(run_dir: str, attempt: str) -> None:
    """Write a file on SIGUSR2, and continue until the process is killed."""
    node = os.environ["SUBMITIT_LOCAL_GLOBALID"]
    signal.signal(signal.SIGUSR2, lambda *_: (Path(run_dir) / f"warned-{node}").touch())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        time.sleep(0.05)
