"""Gradients of every schedule on gloo ranks have the bits of the loop without a pipeline."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.trainer.parallel.pipeline.gradient_program import SCALED, STAGES_PER_RANK
from tests.warm_programs import WarmPrograms
from trainer.costs.simulation import COMPUTES, Kind
from trainer.parallel.apply.pipeline_stage import with_communication
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.rank_progress.progress import AWAITED_SENDS, RECEIVES, Activity

pytestmark = pytest.mark.multi

PROGRAM = "tests.trainer.parallel.pipeline.gradient_program"
Result = dict[str, dict[str, Any]]
ACTIVITIES = {
    Kind.FORWARD: Activity.FORWARD,
    Kind.BACKWARD: Activity.BACKWARD,
    Kind.INPUT_GRADIENT: Activity.INPUT_GRADIENT,
    Kind.WEIGHT_GRADIENT: Activity.WEIGHT_GRADIENT,
}
SENT = {Kind.SEND_ACTIVATION: Activity.SEND_ACTIVATION, Kind.SEND_GRADIENT: Activity.SEND_GRADIENT}
AWAITED = dict(zip(SENT.values(), AWAITED_SENDS, strict=True))


class Ranks(NamedTuple):
    world: int
    dp: int = 0
    tp: int = 1
    keys: Mapping[str, Any] = MappingProxyType({})

    @property
    def holders(self) -> int:
        return max(1, self.dp) * self.tp

    @property
    def names(self) -> int:
        return 3 + 9 * 2 * (self.world // self.holders)


LAYOUTS = {
    "3 ranks": Ranks(3),
    "pp 2 x dp 2": Ranks(4, dp=2),
    "2 ranks": Ranks(2),
    "4 ranks": Ranks(4),
    "pp 2 x dp 1": Ranks(2, dp=1),
    "pp 2 x tp 2": Ranks(4, dp=1, tp=2),
    "pp 2 x dp 2 x tp 2": Ranks(8, dp=2, tp=2),
    "pp 2 x dp 2, bfloat16": Ranks(4, dp=2, keys={"train": {"dtype": "bfloat16"}}),
    "pp 2 x dp 1, float16": Ranks(2, dp=1, keys={"train": {"dtype": "float16"}}),
    "pp 2 x tp 2, bfloat16": Ranks(4, dp=1, tp=2, keys={"train": {"dtype": "bfloat16"}}),
    "recomputed": Ranks(2, dp=1, keys={"train": {"activation_checkpointing": True}}),
    "products kept": Ranks(
        2, dp=1, keys={"train": {"activation_checkpointing": True, "recompute": {"keep": "products"}}}
    ),
    "pp 2 x dp_replicate 2": Ranks(4, dp=2, keys={"replicas": 2}),
    "pp 2 x dp 2, in host memory": Ranks(4, dp=2, keys={"fsdp": {"offload": "all"}}),
    "compiled": Ranks(2, dp=1, keys={"train": {"compile": True}}),
    "loss in chunks": Ranks(2, dp=1, keys={"train": {"loss_chunks": 2}}),
}
LONG = tuple(LAYOUTS)[2:]
NOT_SPLIT = ("gpipe", "1f1b", "interleaved_1f1b")
"""Schedules that support activation checkpointing and compiled layers."""


def schedules_of(layout: str) -> tuple[str, ...]:
    train = LAYOUTS[layout].keys.get("train", {})
    return NOT_SPLIT if {"activation_checkpointing", "compile"} & set(train) else tuple(STAGES_PER_RANK)


CASES = [
    pytest.param(layout, schedule, marks=pytest.mark.proof if layout in LONG else ())
    for layout in LAYOUTS
    for schedule in schedules_of(layout)
]


@pytest.fixture(scope="module")
def results(programs: WarmPrograms, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Result]]:
    found: dict[str, list[Result]] = {}

    def of(layout: str) -> list[Result]:
        if layout not in found:
            world, dp, tp, keys = LAYOUTS[layout]
            folder = tmp_path_factory.mktemp("pipeline")
            told = (dp, tp, json.dumps(dict(keys)), *schedules_of(layout))
            rows = [(folder, world, rank, *told) for rank in range(world)]
            ended = programs.run(PROGRAM, rows, patience=280.0)
            assert [one.code for one in ended] == [0] * world, "\n".join(one.err for one in ended)
            found[layout] = [one.result() for one in ended]
        return found[layout]

    return of


@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_gradients_are_those_of_no_pipeline(results: Callable[[str], list[Result]], layout: str, schedule: str) -> None:
    world, holders, due = LAYOUTS[layout].world, LAYOUTS[layout].holders, LAYOUTS[layout].names
    found = [one[schedule] for one in results(layout)]
    names = [name for one in found for name in one["names"]]
    assert len(set(names)) == due
    assert len(names) == due * holders
    assert [one["different"] for one in found] == [[]] * world
    if LAYOUTS[layout].dp and schedule in SCALED:
        # The same with twice the loss, times the scale of float16.
        assert [one["scaled"] for one in found] == [[]] * world


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_over_data_parallel_ranks_they_are_those_of_one_process_but_for_the_order_of_sums(
    results: Callable[[str], list[Result]], schedule: str
) -> None:
    assert max(one[schedule]["from_one_process"] for one in results("pp 2 x dp 2")) < 1e-6


@pytest.mark.proof
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
@pytest.mark.parametrize("layout", ["pp 2 x tp 2", "pp 2 x dp 2 x tp 2"])
def test_with_tensor_parallelism_they_are_those_of_one_process_but_for_the_order_of_sums(
    results: Callable[[str], list[Result]], layout: str, schedule: str
) -> None:
    assert max(one[schedule]["from_one_process"] for one in results(layout)) < 1e-5


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
@pytest.mark.parametrize("layout", ["3 ranks", "pp 2 x dp 2"])
def test_the_rank_of_the_last_stage_has_the_loss_with_and_without_gradients(
    results: Callable[[str], list[Result]], layout: str, schedule: str
) -> None:
    found = [one[schedule] for one in results(layout)]
    expected = [one["expected_loss"] if one["has_last"] else 0.0 for one in found]
    assert [one["loss"] for one in found] == [one["validated"] for one in found] == expected
    assert sum(one["has_last"] for one in found) == LAYOUTS[layout].holders


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_watchers_see_what_the_table_says_and_waits_before_it(
    results: Callable[[str], list[Result]], schedule: str
) -> None:
    pipeline = PipelineConfig(
        stages=3 * STAGES_PER_RANK[schedule], schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule]
    )
    table = with_communication(pipeline, 6)
    for actions, one in zip(table, results("3 ranks"), strict=True):
        moments = [tuple(moment) for moment in one[schedule]["moments"]]
        computed = [one for one in moments if one[0] not in (*RECEIVES, *AWAITED, *AWAITED_SENDS)]
        expected = [
            (ACTIVITIES[action.kind] if action.kind in COMPUTES else Activity.REDUCE, action.stage, action.micro_batch)
            for action in actions
            if action.kind in COMPUTES or action.kind is Kind.REDUCE
        ]
        assert computed == expected
        for wait, after in zip(moments, moments[1:], strict=False):
            if wait[0] in RECEIVES:
                forward = wait[0] == Activity.WAIT_FOR_ACTIVATION
                assert after[0] in ((Activity.FORWARD,) if forward else (Activity.BACKWARD, Activity.INPUT_GRADIENT))
                assert after[1:] == wait[1:]
        receives = [action for action in actions if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)]
        assert sum(one[0] in RECEIVES for one in moments) == len(receives)
        sends = [(SENT[action.kind], action.stage, action.micro_batch) for action in actions if action.kind in SENT]
        assert [one for one in moments if one[0] in SENT.values()] == sends
        awaited = [one for one in moments if one[0] in AWAITED_SENDS]
        assert sorted(awaited) == sorted((AWAITED[one], *rest) for one, *rest in sends)
        assert moments[len(moments) - len(awaited) :] == awaited, "nobody waits for a send before the end of the step"


def test_buffers_are_kept_for_micro_batches_in_flight_alone(results: Callable[[str], list[Result]]) -> None:
    found = results("3 ranks")
    assert [one["1f1b"]["buffers"] for one in found] == [0, 3, 2]  # one more than computed: received ahead
    assert [one["gpipe"]["buffers"] for one in found] == [0, 6, 6]
    assert {one[schedule]["buffers_left"] for one in found for schedule in STAGES_PER_RANK} == {0}
