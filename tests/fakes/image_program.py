"""Torchrun script that prints its steps, continues from its file, saves on SIGTERM, and leaves a child behind.

torchrun image_program.py FOLDER: each rank writes FOLDER/rank-N.json. It trains until FOLDER/stop exists.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
own = folder / f"rank-{os.environ['RANK']}.json"
saved = folder / "step"


def save_and_exit(*_: object) -> None:
    """End as a script should that was asked to stop."""
    own.with_suffix(".term").touch()
    os._exit(0)


signal.signal(signal.SIGTERM, save_and_exit)
dist.init_process_group("gloo")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
first = int(saved.read_text()) if saved.exists() else 0
found = [
    name for name in ("orchestrator", "trainer", "checkpointing", "psutil", "xxhash") if importlib.util.find_spec(name)
]
facts = {"pid": os.getpid(), "child": child.pid, "first": first, "found": found, "python": sys.executable}
own.write_text(json.dumps({**facts, "image": Path("/image-mark").exists()}))
step = first
while not (folder / "stop").exists():
    step += 1
    dist.all_reduce(torch.ones(1))
    if os.environ["RANK"] == "0":
        saved.write_text(str(step))
        sys.stdout.write(f"step {step}/9999\n")
        sys.stdout.flush()
    time.sleep(0.05)
child.kill()
