"""Drills on real ranks: what the cells and the flight of a fault look like from outside."""

import pytest

from trainer.agent.ranks.last_cpp_exception import last_cpp_exception
from trainer.contract.events import EventKind
from trainer.contract.outcome import ExitCode
from trainer.contract.progress import Phase

pytestmark = pytest.mark.multi


def drilled(make_run, kind: str, value: float = 0.0, **over):
    event = {"kind": kind, "rank": 1, "step": 3, "value": value}
    return make_run(2, parallel={"dp_shard": 2}, train={"steps": 5}, drill={"events": [event]}, **over)


def stuck(run) -> list[list]:
    """Run until everybody stands still, and end it; the cells as they were then."""
    answer = run.ranks.run(
        run_dir=str(run.dir.path), attempt=1, generation=1, world=run.world, actions=[], patience=60, still_after=2
    )
    assert answer["timed_out"], run.log()
    return answer["cells"]


PASSING = ["hang-in-data", "hang-in-forward", "hang-in-save", "hang-in-collective", "hold-lock", "slow-rank", "spike"]


@pytest.mark.parametrize("kind", PASSING)
def test_what_passes_is_told_and_changes_no_bit(make_run, kind):
    run = drilled(make_run, kind, value=0.3, checkpoint={"every": 3})
    answer = run.train()
    assert answer["codes"] == [0, 0], run.log()
    told = run.events(1)
    assert [event.data for event in told if event.kind == EventKind.DRILL] == [{"kind": kind, "rank": 1, "step": 3}]
    if kind != "spike":
        calm = make_run(2, parallel={"dp_shard": 2}, train={"steps": 5}, checkpoint={"every": 3})
        calm.train()
        assert run.losses() == calm.losses()


@pytest.mark.parametrize(
    ("kind", "phase"), [("hang-in-data", "DATA"), ("hang-in-forward", "FORWARD"), ("hang-in-collective", "OPTIMIZER")]
)
def test_a_rank_that_hangs_stands_in_its_phase_and_behind_its_peers(make_run, kind, phase):
    (waiting, ahead), (hangs, behind) = stuck(drilled(make_run, kind))
    assert hangs == phase
    # Counted when a phase is entered: who waits inside of one has begun the same number as who hangs in it.
    assert (Phase[waiting], ahead) >= (Phase[hangs], behind)
    assert (waiting == hangs) == (kind != "hang-in-data")


def test_ranks_in_different_collectives_wait_for_ever(make_run):
    cells = stuck(drilled(make_run, "desync-order"))
    assert {phase for phase, _ in cells} <= {"OPTIMIZER", "DATA", "FORWARD"}


def test_a_collective_of_another_size_aborts_the_rank_and_its_log_says_so(make_run):
    run = drilled(make_run, "desync-shape")
    assert run.train()["codes"] == [ExitCode.RETRY, -6]
    cry = last_cpp_exception(run.attempt.rank_log(1), 1)
    assert cry is not None
    assert "Is there a distributed collective mismatch in your code?" in cry


def test_a_slow_rank_shows_in_its_own_work_and_nowhere_else(make_run):
    answer = drilled(make_run, "slow-rank", value=0.5).train()
    (steps, _, forward, *_), (others, _, slow, *_) = answer["work"]
    assert steps == others == 5
    assert forward < 1.5e9 <= slow  # three steps of half a second
