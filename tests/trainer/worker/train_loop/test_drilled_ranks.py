"""Drills on real ranks."""

import pytest

from trainer.agent.rank_processes.rank_exit import last_output
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.rank_progress.progress import Phase

pytestmark = pytest.mark.multi


def drilled(make_run, kind: str):
    event = {"kind": kind, "rank": 1, "step": 3}
    return make_run(2, parallel={"dp_shard": 2}, train={"steps": 5}, drill={"events": [event]})


def stuck(run) -> list[list]:
    answer = run.ranks.run(
        run_dir=str(run.dir.path), attempt=1, generation=1, world=run.world, actions=[], patience=60, still_after=2
    )
    assert answer["timed_out"], run.log()
    return answer["cells"]


PASSING = ("hang-in-data", "hang-in-forward", "hang-in-save", "hang-in-collective", "hold-lock", "slow-rank")
"""One per step from step 1 on; a save can only hang in a step that saves."""


def told(run, rank: int = 1) -> list[dict]:
    return [event.data for event in run.events(rank) if event.kind == EventKind.DRILL]


def test_what_passes_is_told_changes_no_bit_and_shows_in_the_ranks_own_work(make_run, undisturbed):
    events = [
        {"kind": kind, "rank": 1, "step": step, "value": 0.4 if kind == "slow-rank" else 0.2}
        for step, kind in enumerate(PASSING, start=1)
    ]
    assert events[2]["step"] % 3 == 0
    over = {"parallel": {"dp_shard": 2}, "train": {"steps": 6}, "checkpoint": {"every": 3}}
    run = make_run(2, **over, drill={"events": events})
    answer = run.train()
    assert answer["codes"] == [0, 0], run.log()
    assert told(run) == [{key: event[key] for key in ("kind", "rank", "step")} for event in events]
    assert run.losses() == undisturbed(2, **over).losses()
    (steps, _, forward, *_), (others, _, slow, *_) = answer["work"]
    assert steps == others == 6
    assert forward < slow
    assert slow >= 4e8  # the time of what waits is not work


@pytest.mark.parametrize("rank", [0, 1])
def test_a_spoiled_loss_shows_whichever_stage_the_rank_has(make_run, rank):
    events = [{"kind": kind, "rank": rank, "step": step} for kind, step in (("spike", 3), ("nan", 4))]
    run = make_run(
        2, parallel={"pipeline": {"stages": 2}}, model={"layers": 2}, train={"steps": 4, "dtype": "float32"},
        drill={"events": events},
    )  # fmt: skip
    codes = run.train()["codes"]
    ends = [run.outcome(number, 1) for number in range(2)]
    assert [(end.exception, end.step) for end in ends] == [("BadStep", 4)] * 2, codes
    assert run.losses()[3] > 50 * run.losses()[2]
    assert told(run, rank) == events


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
    saw, sent = run.train()["codes"]
    assert saw in (ExitCode.RETRY, ExitCode.ERROR)  # its peer has gone, or what came from it is no row of this step
    assert sent == -6
    cry = last_output(run.attempt.rank_log(1), 1, run.attempt.error_file(1, 1)).uncaught
    assert cry is not None
    assert "Is there a distributed collective mismatch in your code?" in cry
