"""Simulated schedules agree with hand calculations and formulas; deadlocks are detected."""

import pytest

from trainer.costs.simulation import (
    DeadlockError,
    Kind,
    PipelineAction,
    RankSeconds,
    StageSeconds,
    bubbles,
    formula,
    simulate,
)

EVEN = StageSeconds(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
SEND_F, SEND_B = Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT


def one_micro_batch(backward: tuple[Kind, ...] = (B,)) -> list[list[PipelineAction]]:
    first = [PipelineAction(0, F, 0), PipelineAction(0, SEND_F, 0), *(PipelineAction(0, kind, 0) for kind in backward)]
    second = [
        PipelineAction(1, F, 0),
        *(PipelineAction(1, kind, 0) for kind in backward[:1]),
        PipelineAction(1, SEND_B, 0),
    ]
    return [first, [*second, *(PipelineAction(1, kind, 0) for kind in backward[1:])]]


def test_one_micro_batch_passes_through_two_stages_and_back() -> None:
    found = simulate(one_micro_batch(), [EVEN, EVEN])
    assert [(str(span.action), span.begin, span.end) for spans in found.spans for span in spans] == [
        ("0F0", 0.0, 1.0), ("0B0", 4.0, 6.0), ("1F0", 1.0, 2.0), ("1B0", 2.0, 4.0),
    ]  # fmt: skip
    assert found.seconds == 6.0
    assert bubbles(found.ranks()) == [0.5, 0.5]


def test_a_send_takes_time_and_none_of_its_rank() -> None:
    slow = StageSeconds(forward=1.0, input_gradient=1.0, weight_gradient=1.0, send=0.5)
    found = simulate(one_micro_batch(), [slow, slow])
    assert [span.begin for spans in found.spans for span in spans] == [0.0, 5.0, 1.5, 2.5]


def test_gradients_of_weights_are_computed_behind_those_of_activations_but_in_the_first_stage() -> None:
    found = simulate(one_micro_batch((I, W)), [EVEN, EVEN])
    assert [(str(span.action), span.begin, span.end) for spans in found.spans for span in spans] == [
        ("0F0", 0.0, 1.0), ("0I0", 3.0, 3.0), ("0W0", 3.0, 5.0), ("1F0", 1.0, 2.0), ("1I0", 2.0, 3.0),
        ("1W0", 3.0, 4.0),
    ]  # fmt: skip


def test_two_stages_of_one_rank_need_no_send() -> None:
    table = [[PipelineAction(0, F, 0), PipelineAction(1, F, 0), PipelineAction(1, B, 0), PipelineAction(0, B, 0)]]
    assert simulate(table, [EVEN, EVEN]).seconds == 6.0


def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_for() -> None:
    table = [
        [PipelineAction(0, B, 0), PipelineAction(0, F, 0), PipelineAction(0, SEND_F, 0)],
        [PipelineAction(1, F, 0), PipelineAction(1, B, 0)],
    ]
    with pytest.raises(DeadlockError, match=r"^ranks wait for each other: rank 0: 0B0, rank 1: 1F0$"):
        simulate(table, [EVEN, EVEN])


def test_the_bubble_is_what_a_rank_waits_in_receives_and_at_the_end_of_the_step() -> None:
    ranks = [
        RankSeconds(span=10.0, computed={0: 8.0}, waited={0: 2.0}),
        RankSeconds(span=8.0, computed={1: 4.0, 2: 3.0}, waited={1: 0.5, 2: 0.5}),
    ]
    assert bubbles(ranks) == pytest.approx([0.2, 0.3])
    assert bubbles([RankSeconds(span=0.0, computed={}, waited={})]) == [0.0]


def test_the_formula() -> None:
    assert formula(4, 8) == pytest.approx(3 / 11)
    assert formula(4, 8, stages_per_rank=2) == pytest.approx(3 / 19)
    assert formula(1, 8) == 0.0
