"""Unmodified programs on the real Slurm, which finish although they are killed repeatedly in four ways."""

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.user import User
from tests.slurm import processes
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.multi]
ROOT = Path(__file__).resolve().parents[2]
INTEROP = ROOT / ".venv" / "interop"
PLAIN_DDP, TRAINER = ROOT / "tests/fakes/plain_ddp.py", ROOT / "tests/interop/trainer_program.py"
SHAPE = [
    "cluster.nodes=2", "cluster.ranks_per_node=1", "cluster.cpus_per_task=2", "cluster.partition=low",
    "cluster.time=30", "recovery.backoff=0.5",
]  # fmt: skip
WAIT = 180.0
"""Seconds for a start on a busy machine; Slurm needs 20 of them to detect a lost node."""


class Program:
    """A run of a user's program, with disturbances."""

    def __init__(
        self, lab: SlurmLab, user: User, script: Path, folder: Path, *more: str, settings: Sequence[str]
    ) -> None:
        self.lab, self.user, self.folder = lab, user, folder
        folder.mkdir()
        words = [sys.executable, str(script), "--folder", str(folder), *more]
        command = f"command=[{', '.join(repr(word) for word in words)}]"
        self.run = user.submit("torchrun-script", command, *SHAPE, *settings)["run"]

    def step(self) -> int:
        path = self.folder / "losses.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def final(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "final.json").read_text()))

    def until_it_trains_on(self, steps: int = 7) -> None:
        """Wait for this many new steps, which include a checkpoint."""
        last = self.step()
        self.user.until(lambda: self.step() >= last + steps, WAIT, f"training beyond step {last + steps}")

    def ranks(self) -> dict[int, int]:
        """Return the pids of the programs by rank, without their children."""
        found: dict[int, int] = {}
        for pid in sorted(processes.job_processes(self.lab.conf)):
            environ = processes.environment_of(pid)
            if environ.get("ORCH_RUN") == self.run and "RANK" in environ:
                found.setdefault(int(environ["RANK"]), pid)
        return found

    def nodes(self) -> list[str]:
        return self.lab.nodes_of(self.user.status(self.run)["job_id"])

    # -- disturbances; each returns when it has ended

    def kill_rank(self) -> None:
        processes.send([self.ranks()[1]], signal.SIGKILL)

    def terminate_rank(self) -> None:
        processes.send([self.ranks()[0]], signal.SIGTERM)

    def kill_node(self) -> None:
        before, dead = self.user.status(self.run)["attempts"], self.nodes()[-1]
        self.lab.kill_node(dead)
        try:
            self.user.until(lambda: self.user.status(self.run)["attempts"] > before, WAIT, "another attempt")
        finally:
            self.lab.start_node(dead)

    def preempt(self) -> None:
        before = self.user.status(self.run)["attempts"]
        urgent = self.lab.ask(
            "sbatch", "-p", "high", "-N", "4", "--exclusive", "--parsable", "-o", "/dev/null", "--wrap", "sleep 3"
        )
        assert urgent.returncode == 0, urgent.stderr
        self.user.until(lambda: self.user.status(self.run)["attempts"] > before, WAIT, "another attempt")


WAYS: dict[str, Callable[[Program], None]] = {
    "rank": Program.kill_rank, "node": Program.kill_node, "preemption": Program.preempt,
    "SIGTERM": Program.terminate_rank,
}  # fmt: skip


def disturb(program: Program, ways: Sequence[str]) -> list[tuple[str, float]]:
    """Apply the disturbances in turn, each once training has resumed; return the seconds of each."""
    took, slow = [], program.folder / "slow"
    slow.touch()
    for way in ways:
        program.until_it_trains_on()
        began = time.monotonic()
        WAYS[way](program)
        took.append((way, round(time.monotonic() - began, 1)))
    program.until_it_trains_on()
    slow.unlink()
    return took


def assert_succeeded(program: Program) -> dict[str, Any]:
    code = program.user.wait(program.run, 600)
    shown = program.user.show(program.run)
    story = json.dumps(shown["attempts"], indent=1)
    assert (code, shown["state"]) == (0, "SUCCEEDED"), story
    return shown


@pytest.mark.proof
@pytest.mark.timeout(2400)
def test_a_plain_ddp_script_three_times_in_each_way(
    lab: SlurmLab, user: User, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    steps = ["--steps", "1200", "--every", "5"]
    killed = Program(lab, user, PLAIN_DDP, tmp_path / "killed", *steps, "--pause", "0.5", settings=[])
    record_property("seconds", disturb(killed, list(WAYS) * 3))
    shown = assert_succeeded(killed)
    record_property("attempts and generations", [attempt["generations"] for attempt in shown["attempts"]])
    assert len(shown["attempts"]) >= 7
    calm = Program(lab, user, PLAIN_DDP, tmp_path / "calm", *steps, settings=[])
    assert_succeeded(calm)
    assert killed.final()["loss"] == calm.final()["loss"]


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_hugging_faces_trainer_three_times_in_each_way(
    lab: SlurmLab, user: User, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if not INTEROP.is_dir():
        pytest.fail(f"{INTEROP} is missing: `make {INTEROP.relative_to(ROOT)}/.ready` makes it")
    steps, library = ["--steps", "1200", "--every", "5"], f"+env.PYTHONPATH={INTEROP}"
    known = [library, f"checkpoints.path={tmp_path / 'killed' / 'out'}"]
    killed = Program(lab, user, TRAINER, tmp_path / "killed", *steps, "--pause", "0.5", settings=known)
    record_property("seconds", disturb(killed, list(WAYS) * 3))
    shown = assert_succeeded(killed)
    record_property("attempts and generations", [attempt["generations"] for attempt in shown["attempts"]])
    assert len(shown["attempts"]) >= 7
    assert shown["last_checkpoint"]["step"] == 1200
    calm = Program(lab, user, TRAINER, tmp_path / "calm", *steps, settings=[library])
    assert_succeeded(calm)
    assert killed.final() == calm.final()
