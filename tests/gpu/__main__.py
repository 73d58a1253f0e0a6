"""What an owner of GPUs runs, in under ten minutes: `make test-gpu` prints one table to send back.

    python -m tests.gpu [--gpus N] [--cpu] [--only CHECK ...] [--keep FOLDER]

Every check is a real run of `orch submit` on this machine, with a rank on each GPU. `--cpu` takes four ranks on the CPU
instead, which shows that the checks themselves work. Exit code 1 when a check has failed.
"""

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.end_to_end.user import User
from tests.gpu.checks import CHECKS, Bench, Failed, Impossible

_CPU_RANKS = 4
_NO_GPU = "error: torch sees no GPU here. `.venv/bin/python -m tests.gpu --cpu` makes the same checks with four ranks"
_FACTS = """
import torch
gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
software = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, NCCL {nccl}"
print(len(gpus), software, *sorted(set(gpus)), sep="; ")
"""


def facts() -> tuple[int, str]:
    """How many GPUs torch sees here, and what they and the software are; in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True, check=True)
    count, words = done.stdout.strip().split("; ", 1)
    return int(count), words


def driver() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:  # there is none, or a folder of PATH is closed to this user
        return "no nvidia-smi"
    return f"driver {done.stdout.split()[0]}" if done.stdout.split() else "no driver"


def row(name: str, bench: Bench) -> tuple[str, str, float]:
    """The result of one check, its figure, and its seconds."""
    began = time.monotonic()
    try:
        result, figure = "passed", CHECKS[name](bench)
    except Impossible as why:
        result, figure = "not here", str(why)
    except (Failed, AssertionError, subprocess.TimeoutExpired, LookupError, OSError) as error:
        result, figure = "FAILED", " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return result, figure, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="how many to use; by default all that torch sees, up to 8")
    parser.add_argument("--cpu", action="store_true", help="four ranks on the CPU instead")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which is kept")
    options = parser.parse_args()
    found, words = facts()
    gpus = 0 if options.cpu else min(options.gpus or 8, found)
    if not gpus and not options.cpu:
        print(_NO_GPU, file=sys.stderr)
        return 2
    print(f"- date: {datetime.datetime.now(datetime.UTC).date()}")
    print(f"- machine: {words}; {driver()}; {os.cpu_count()} cores")
    print(f"- ranks: {gpus or _CPU_RANKS} on {'GPUs' if gpus else 'the CPU'}\n")
    print("| check | result | seconds | figure |\n|---|---|---|---|", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="orch-gpu-") as temporary:
        user = User(options.keep or Path(temporary), "local")
        try:
            bench = Bench(user, gpus, gpus or _CPU_RANKS)
            for name in options.only:
                result, figure, seconds = row(name, bench)
                failed += result == "FAILED"
                print(f"| {name} | {result} | {seconds:.0f} | {figure} |", flush=True)
        finally:
            user.leave()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
