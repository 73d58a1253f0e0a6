"""Measured bubbles of sleeping stages agree with formula and simulation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.worker.set_clock import SetClock
from tests.warm_programs import WarmPrograms
from trainer.costs.simulation import RankSeconds, StageSeconds, bubbles, formula, simulate
from trainer.parallel.apply.pipeline_runtime import BubbleMeter
from trainer.parallel.apply.pipeline_stage import Watched, with_communication
from trainer.protocol.config_sections.pipeline_config import PipelineConfig, Schedule
from trainer.protocol.rank_progress.progress import Activity, StageActivity

PROGRAM = "tests.trainer.parallel.pipeline.sleeping_program"
SECONDS, MICRO_BATCHES, STEPS = 0.1, 8, 4


def test_waits_and_computations_are_summed_up_by_stage() -> None:
    clock = SetClock()
    meter = BubbleMeter(clock)

    def spend(activity: Activity, stage: int, seconds: float) -> None:
        moment = StageActivity(activity, stage, 0)
        with Watched([meter], moment):
            clock.now += seconds

    spend(Activity.FORWARD, 0, 9.0)
    meter.start()
    spend(Activity.WAIT_FOR_ACTIVATION, 1, 2.0)
    spend(Activity.FORWARD, 1, 1.0)
    clock.now += 0.5
    spend(Activity.WAIT_FOR_GRADIENT, 1, 3.0)
    spend(Activity.BACKWARD, 1, 2.0)
    spend(Activity.FORWARD, 3, 1.0)
    spend(Activity.WAIT_FOR_GRADIENT, 3, 0.25)
    spend(Activity.SEND_GRADIENT, 3, 0.125)
    spend(Activity.REDUCE, 3, 4.0)
    spend(Activity.WAIT_FOR_SENT_ACTIVATION, 1, 1.5)
    spend(Activity.WAIT_FOR_SENT_GRADIENT, 3, 1.0)
    assert meter.take() == RankSeconds(
        span=9.5, computed={1: 3.0, 3: 1.0}, waited={1: 5.0, 3: 0.25}, sends=2.5, reductions=4.0
    )


@pytest.mark.proof
@pytest.mark.multi
@pytest.mark.parametrize("world", [2, 4])
def test_the_bubble_of_stages_that_sleep(
    programs: WarmPrograms, tmp_path: Path, record_property: Callable[[str, object], None], world: int
) -> None:
    rows = [(tmp_path, world, rank, SECONDS, MICRO_BATCHES, STEPS, *Schedule) for rank in range(world)]
    ended = programs.run(PROGRAM, rows, patience=280.0)
    assert [one.code for one in ended] == [0] * world, "\n".join(one.err for one in ended)
    results = [one.result() for one in ended]
    measured, simulated = {}, {}
    for schedule in Schedule:
        measured[schedule] = bubbles(least_disturbed([one[schedule] for one in results]))
        simulated[schedule] = on_paper(schedule, world)
        told = " ".join(f"{share:.3f}" for share in measured[schedule])
        record_property(f"bubbles of {world} ranks, {schedule}, {simulated[schedule]:.3f} on paper", told)
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        assert measured[schedule] == pytest.approx([formula(world, MICRO_BATCHES)] * world, rel=0.2)
    plain = min(measured[Schedule.GPIPE] + measured[Schedule.ONE_F_ONE_B])
    for schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE, Schedule.ZBV):
        assert max(measured[schedule]) < plain
        assert measured[schedule] == pytest.approx([simulated[schedule]] * world, abs=0.08)


def least_disturbed(ranks: list[list[dict[str, Any]]]) -> list[RankSeconds]:
    """Return all ranks' times in the shortest step: a busy machine delays stages."""
    steps = [[RankSeconds(**one) for one in step] for step in zip(*ranks, strict=True)]
    return min(steps, key=lambda step: max(one.span for one in step))


def on_paper(schedule: Schedule, world: int) -> float:
    per_rank = PipelineConfig(stages=2 * world, schedule=schedule).per_rank
    config = PipelineConfig(stages=per_rank * world, schedule=schedule)
    one = SECONDS / per_rank
    seconds = [StageSeconds(forward=one, input_gradient=one, weight_gradient=one)] * config.stages
    return max(bubbles(simulate(with_communication(config, MICRO_BATCHES), seconds).ranks()))
