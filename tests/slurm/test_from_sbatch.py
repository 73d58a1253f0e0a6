"""A user's own sbatch script on the real Slurm, converted: its setup, its ranks, and a recovery."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.end_to_end.user import User
from trainer.agent.fork_server.instrumentation import STARTUP

pytestmark = [pytest.mark.slurm, pytest.mark.multi]

SCRIPT = """#!/bin/bash
#SBATCH --job-name="my job"
#SBATCH --partition=low
#SBATCH -N 2 --ntasks-per-node=2
#SBATCH --time=10
source ./env.sh
export FROM_SCRIPT="a b"
OUT=$(pwd)/out
mkdir -p $OUT
srun --label python program.py --out "$OUT" --tasks $SLURM_NTASKS | tee log.txt
"""
PROGRAM = """import json, os, signal, sys
names = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "LOCAL_RANK", "FROM_SCRIPT",
         "FROM_SETUP", "PYTHONPATH")
found = {"args": sys.argv[1:], "cwd": os.getcwd(), "python": sys.executable}
found |= {name: os.environ.get(name) for name in names}
path = os.path.join(sys.argv[2], os.environ["ORCH_GENERATION"] + "-" + os.environ["RANK"])
open(path, "w").write(json.dumps(found))
if os.environ["ORCH_GENERATION"] == "1":
    os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "3" else signal.pause()
"""


def test_an_sbatch_script_becomes_a_run_that_recovers(user: User, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "bin").mkdir(parents=True)
    (project / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (project / "bin" / "python").chmod(0o755)
    setup = f"export PATH={project}/bin:$PATH PYTHONPATH=/mine FROM_SETUP=yes\n"
    for name, text in (("job.sh", SCRIPT), ("program.py", PROGRAM), ("env.sh", setup)):
        (project / name).write_text(text)
    user.folder = project  # where the user types
    settings = (f"cluster.root={user.root}", "recovery.backoff=0.2")
    run = user.ask("submit", "--from-sbatch", "job.sh", "-y", *settings)["run"]
    assert run == "my-job-1"
    assert user.wait(run, 120) == 0
    notes = {path.name: json.loads(path.read_text()) for path in (project / "out").iterdir()}
    assert {f"2-{rank}" for rank in range(4)} <= set(notes)
    wanted = {
        "args": ["--out", str(project / "out"), "--tasks", "4"], "cwd": str(project), "RANK": "2", "WORLD_SIZE": "4",
        "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "LOCAL_RANK": "0", "FROM_SCRIPT": "a b",
        "FROM_SETUP": "yes", "PYTHONPATH": f"{STARTUP}{os.pathsep}/mine",
    }  # fmt: skip
    assert {name: notes["2-2"][name] for name in wanted} == wanted


def test_init_reads_this_slurm(user: User) -> None:
    found = user.ask("init", "--print")
    assert {item["partition"] for item in found["partitions"]} >= {"low", "high"}
    assert found["settings"]["partition"] == "low"
    assert found["settings"]["root"].endswith("orch-runs")
