"""Real agents and ranks whose run is hurt again and again: rolled back, killed, moved to a spare; its bits stay."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.job import LocalJob, alive, until
from tests.trainer.agent.test_torch_ranks import generations_of, training  # noqa: F401  # fixtures
from trainer.protocol import skipped_batches
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptResult
from trainer.protocol.skipped_batches import Skip

pytestmark = pytest.mark.multi

WORKERS = Path(__file__).parent.parent / "worker"
PATIENT = """
import time
from pathlib import Path
from any_optimizer import Stateful
from checkpointing.format.manifest import COMMIT


class Patient(Stateful):
    # The first fault comes when a checkpoint is on the disk.
    def loss(self, model, batch):
        while self.count == 5 and not list(Path(self.args["saved"]).glob(f"step-00000004.*/{COMMIT}")):
            time.sleep(0.01)
        return super().loss(model, batch)
"""


def patient(folder: Path, run: str) -> dict[str, Any]:
    """The configuration of a workload with state of all kinds, for the job in the subfolder `run`."""
    (folder / "patient_workload.py").write_text(PATIENT)
    args = {"optimizer": "schedulefree:AdamWScheduleFree", "rows": 2, "width": 6}
    return {
        "workload": {
            "target": "patient_workload:Patient",
            "path": [str(folder), str(WORKERS)],
            "args": {**args, "saved": str(folder / run / "run-1" / "checkpoints")},
        },
        "folder": run,
        "train": {"steps": 13, "dtype": "float32"},
        "optimizer": {"lr": 0.05},
    }


FAULTS = [
    {"kind": kind, "rank": 1, "step": step, "generation": generation}
    for generation, (kind, step) in enumerate((("nan", 7), ("kill-rank", 10), ("hold-lock", 11)), 1)
]


def lose_an_agent(work: LocalJob) -> None:
    """Kill the one of a rank that stands still: it does not leave by itself when its peer is gone."""
    until(lambda: any(event.data["kind"] == "hold-lock" for event in work.events(EventKind.DRILL)), 90, work.story)
    family = [pid for pid in work.processes() if os.getsid(pid) == work.agents[1].pid]
    assert len(family) > 2
    work.agents[1].kill()
    assert work.wait(90) == [0, -signal.SIGKILL, 0], work.story()
    assert not [pid for pid in family if alive(pid)]


def assert_went_on_each_time(work: LocalJob) -> None:
    outcome = work.outcome()
    assert (outcome.result, outcome.generations, outcome.step) == (AttemptResult.FINISHED, 4, 13), work.story()
    assert all(event.data["warm"] for event in work.events(EventKind.FORK_SERVER)), work.story()
    failures = [event.data["failure"] for event in work.events(EventKind.GENERATION_ENDED)]
    assert [one and one["kind"] for one in failures] == ["numeric", "rank_killed", "agent_lost", None]
    assert failures[1]["rank"] == 1
    steps = generations_of(work)
    assert [steps[generation][0] for generation in (1, 2, 3)] == [1, 5, 9]
    newest = steps[4][0]  # on disk: the eighth step's may have been cut off by the death of its rank
    assert newest in (5, 9)
    assert steps[4] == list(range(newest, 14))
    (used,) = work.events(EventKind.SPARE_USED)
    assert (used.data["name"], used.data["instead"]) == ("local-2", "local-1")
    restored = work.events(EventKind.CHECKPOINT_RESTORED)
    assert [event.data["tier"] for event in restored] == ["memory", "memory", str(work.run.checkpoints)]
    assert work.events(EventKind.CHECKPOINT_INCOMPLETE) == []
    beat = json.loads(work.attempt.heartbeat.read_text())
    assert (beat["step"], beat["total_steps"], beat["state"], beat["saved_step"]) == (13, 13, "ended", 13)
    assert isinstance(beat["loss"], float)


def assert_left_out(work: LocalJob, step: int) -> Skip:
    """The batch of this bad step, and no other; returns it."""
    decision = work.events(EventKind.DECISION)[0]
    assert decision.data["action"] == "roll_back"
    assert "rollback 1 of 3, skipping that batch" in decision.data["reason"]
    position = (step - 1) * 2  # points that both ranks take
    (left_out,) = work.events(EventKind.BATCH_SKIPPED)
    assert (left_out.data["step"], left_out.data["position"]) == (step, position)
    (kept,) = skipped_batches.read(work.attempt)
    assert (kept.step, kept.position) == (step, position)
    return kept


def weights(work: LocalJob) -> Any:
    return json.loads(work.attempt.final.read_text())["weights_digest"]


def test_a_rollback_a_killed_rank_and_a_lost_agent_leave_the_bits_of_a_run_that_was_told_to_leave_the_batch_out(
    training: Callable[..., LocalJob],  # noqa: F811
    tmp_path: Path,
) -> None:
    hurt = {"drill": {"events": FAULTS}, "spares": 1, "detection": {"preflight": {"on": True}}}
    work = training(**patient(tmp_path, "hurt"), **hurt).start()
    work.go()
    lose_an_agent(work)
    assert_went_on_each_time(work)
    left_out = assert_left_out(work, 7)

    told = training(**patient(tmp_path, "told"), nodes=1, ranks=2)
    skipped_batches.add(told.attempt, [Skip(step=left_out.step, position=left_out.position, reason="told")])
    told.start().go()
    assert told.wait(90) == [0], told.story()
    assert told.outcome().generations == 1, told.story()
    assert weights(told) == weights(work)
