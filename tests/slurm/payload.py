"""A trivial job: what it calls in place of an agent."""

import json
import os
import time
from pathlib import Path


def record(run_dir: str, attempt: str) -> None:
    """Leave one file per node, then wait until `stop` appears in the run directory."""
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
    """End with the exit code that stands in the file `code`."""
    raise SystemExit(int((Path(run_dir) / "code").read_text()))
