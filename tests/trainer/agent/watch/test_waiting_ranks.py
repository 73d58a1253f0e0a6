"""Who waits for whom in a pipeline, by the cells of its ranks, and who has left a message out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.trainer.agent.watch.staged_jobs import LAYOUTS
from tests.trainer.agent.watch.stalls import legal_hour, stage
from trainer.agent.flight.analysis import analyse
from trainer.agent.flight.flight_record import DONE, SCHEDULED, CollectiveEntry, FlightRecord, Group
from trainer.agent.flight.wait_graph import Finding
from trainer.agent.watch.declare_hang import HangVerdict, judge
from trainer.agent.watch.hang_limits import Limits, RankSample
from trainer.agent.watch.waiting_ranks import HangKind, StageNeighbours, never_sent, with_stage_waits
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.rank_progress.progress import Activity, SentMessages, StageActivity

A = Activity
FOUR = StageNeighbours(PipelineConfig(stages=4), 4)
TWO = StageNeighbours(PipelineConfig(stages=2), 2)
PAIRS = StageNeighbours(PipelineConfig(stages=2), 4)  # ranks 0, 1 have stage 0; ranks 2, 3 stage 1
ROUND = StageNeighbours(PipelineConfig(stages=4, schedule="interleaved_1f1b"), 2)
V = StageNeighbours(PipelineConfig(stages=4, schedule="zbv"), 2)


def at(rank: int, activity: Activity | None, stage: int, micro_batch: int = 3, **fields: Any) -> RankSample:
    moment = None if activity is None else StageActivity(activity, stage, micro_batch)
    known: dict[str, Any] = {"phase": "forward", "step": 120, "first": False, "age": 9.5, "alive": 9.5, "state": "S"}
    return RankSample(**{**known, "rank": rank, "node": f"n{rank // 2}", "moment": moment, **fields})


def record(rank: int, inside: bool = False, members: tuple[int, ...] = (0, 1, 2, 3), group: str = "0") -> FlightRecord:
    """A gloo record: four collectives that are over, and perhaps a fifth that is not."""
    entries = [CollectiveEntry(group, number, "all_reduce", "[4]", 4, "Float", DONE, number) for number in range(1, 5)]
    if inside:
        entries.append(CollectiveEntry(group, 5, "all_reduce", "[4]", 4, "Float", SCHEDULED, 5))
    return FlightRecord(
        rank=rank, groups={group: Group(members, 4 + inside, 4, sure=True)}, entries=tuple(entries), whole=True
    )


def found(seen: list[RankSample], neighbours: StageNeighbours, *inside: int) -> Finding:
    flights = {one.rank: record(one.rank, one.rank in inside) for one in seen}
    ranks = [one.rank for one in seen]
    return analyse(with_stage_waits(flights, seen, neighbours), ranks, (), never_sent(seen, neighbours))


@pytest.mark.parametrize(("neighbours", "one", "ends"), [
    (FOUR, at(2, A.WAIT_FOR_ACTIVATION, 2), (1, 2)),
    (FOUR, at(2, A.WAIT_FOR_GRADIENT, 2), (3, 2)),
    (FOUR, at(2, A.WAIT_FOR_SENT_ACTIVATION, 2), (2, 3)),
    (FOUR, at(2, A.WAIT_FOR_SENT_GRADIENT, 2), (2, 1)),
    (PAIRS, at(3, A.WAIT_FOR_ACTIVATION, 1), (1, 3)),
    (PAIRS, at(1, A.WAIT_FOR_GRADIENT, 0), (3, 1)),
    (ROUND, at(0, A.WAIT_FOR_ACTIVATION, 2), (1, 0)),
    (V, at(1, A.WAIT_FOR_GRADIENT, 1), (1, 1)),
])  # fmt: skip
def test_activations_go_to_the_next_stage_and_gradients_to_the_one_before(
    neighbours: StageNeighbours, one: RankSample, ends: tuple[int, int]
) -> None:
    assert one.moment is not None
    message = neighbours.message(one.rank, one.moment)
    assert (message.source, message.target) == ends


@pytest.mark.parametrize("activity", [A.FORWARD, A.BACKWARD, A.WEIGHT_GRADIENT, A.SEND_GRADIENT, A.REDUCE])
def test_who_computes_or_sends_waits_for_no_stage(activity: Activity) -> None:
    assert FOUR.message(1, StageActivity(activity, 1, 3)) is None


def test_numbers_that_no_pipeline_has_are_passed_over() -> None:
    assert FOUR.message(0, StageActivity(A.WAIT_FOR_ACTIVATION, 0, 3)) is None
    assert FOUR.message(3, StageActivity(A.WAIT_FOR_GRADIENT, 9, 3)) is None


def test_the_end_of_a_chain_of_receives_is_named() -> None:
    seen = [
        at(0, A.WAIT_FOR_GRADIENT, 0, 1, phase="forward"), at(1, A.WAIT_FOR_GRADIENT, 1, 1),
        at(2, A.BACKWARD, 2, 1, phase="backward"), at(3, A.WAIT_FOR_ACTIVATION, 3, 5),
    ]  # fmt: skip
    told = found(seen, FOUR)
    assert (told.kind, told.ranks) == ("missing", (2,))
    assert "rank 2 never sent the gradient of micro-batch 1 from rank 2 to rank 1" in told.reason
    assert told.chain == (
        "rank 0 in the gradient of micro-batch 1 from rank 1 to rank 0, behind "
        "rank 1 in the gradient of micro-batch 1 from rank 2 to rank 1"
    )


def test_receives_and_collectives_are_one_chain() -> None:
    seen = [
        at(0, A.FORWARD, 0), at(1, A.FORWARD, 0),
        at(2, A.WAIT_FOR_ACTIVATION, 1), at(3, A.WAIT_FOR_ACTIVATION, 1),
    ]  # fmt: skip
    flights = {rank: record(rank, rank == 1, (0, 1), "tp") for rank in (0, 1)}
    flights |= {rank: record(rank, False, (2, 3), "tp2") for rank in (2, 3)}
    told = analyse(with_stage_waits(flights, seen, PAIRS), range(4), (), never_sent(seen, PAIRS))
    assert told.ranks == (0,)


def test_a_rank_that_waits_until_its_message_is_taken_waits_for_its_receiver() -> None:
    seen = [
        at(0, A.BACKWARD, 0, 7, phase="backward"), at(1, A.BACKWARD, 0, 7, phase="backward"),
        at(2, A.WAIT_FOR_SENT_GRADIENT, 1, 7, phase="backward"), at(3, None, 0, phase="optimizer"),
    ]  # fmt: skip
    told = found(seen, PAIRS, 3)
    assert 2 not in told.ranks
    assert set(told.ranks) == {0, 1}


def test_both_ends_of_a_message_that_stays_away_are_told_and_nobody_is_named() -> None:
    seen = [at(0, A.WAIT_FOR_SENT_ACTIVATION, 0, 7), at(1, A.WAIT_FOR_ACTIVATION, 1, 7)]
    told = found(seen, TWO)
    assert (told.kind, told.culprits) == ("stuck_together", ())
    assert "both ends have called the activation of micro-batch 7 from rank 0 to rank 1" in told.reason


def sent(activations: int, gradients: int, after_step: int = 120) -> SentMessages:
    return SentMessages(after_step=after_step, activations=(activations,), gradients=(gradients,))


BEYOND = [
    # The source of activation 3 of stage 0 has begun to send 5, and waits itself.
    (at(0, A.WAIT_FOR_GRADIENT, 0, 3, sent=sent(5, 0)), True),
    (at(0, A.WAIT_FOR_GRADIENT, 0, 3, sent=sent(3, 0)), False),
    (at(0, A.SEND_ACTIVATION, 0, 3, sent=sent(3, 0)), False),
    (at(0, A.FORWARD, 0, 4, sent=sent(4, 0)), True),
    (at(0, A.WAIT_FOR_SENT_ACTIVATION, 0, 7, sent=sent(8, 0)), True),
    (at(0, A.WAIT_FOR_SENT_ACTIVATION, 0, 3, sent=sent(8, 0)), False),  # it may just not have come yet
    (at(0, None, 0, phase="optimizer", sent=sent(8, 0)), True),
    (at(0, None, 0, phase="data", sent=sent(8, 0, after_step=119)), False),  # that was in the step before
    (at(0, None, 0, phase="data", step=121, sent=sent(8, 0)), True),
    (at(0, None, 0, phase="optimizer", step=119, sent=sent(8, 0, after_step=119)), False),
    (at(0, A.WAIT_FOR_GRADIENT, 0, 7, phase="eval", sent=sent(8, 0)), False),
    (at(0, A.WAIT_FOR_GRADIENT, 0, 3), False),
]


@pytest.mark.parametrize(("source", "beyond"), BEYOND)
def test_a_stage_that_has_gone_on_beyond_an_activation_has_never_sent_it(source: RankSample, beyond: bool) -> None:
    seen = [source, at(1, A.WAIT_FOR_ACTIVATION, 1, 3, sent=sent(0, 3))]
    assert never_sent(seen, TWO) == (frozenset({0}) if beyond else frozenset())


@pytest.mark.parametrize(("gradients", "beyond"), [(3, False), (4, True)])
def test_a_stage_that_has_gone_on_beyond_a_gradient_has_never_sent_it(gradients: int, beyond: bool) -> None:
    seen = [
        at(0, A.WAIT_FOR_GRADIENT, 0, 3, sent=sent(4, 0)),
        at(1, A.WAIT_FOR_ACTIVATION, 1, 4, sent=sent(0, gradients)),
    ]
    assert never_sent(seen, TWO) == (frozenset({1}) if beyond else frozenset())


@pytest.mark.parametrize(("neighbours", "place"), [(ROUND, 1), (V, 1)])
def test_of_several_stages_of_a_rank_each_has_counts_of_its_own(neighbours: StageNeighbours, place: int) -> None:
    whose = {ROUND: (0, 1), V: (1, 0)}[neighbours]
    counts = [4, 4]
    one = at(whose[0], A.WAIT_FOR_GRADIENT, 2, 0)
    other = at(
        whose[1], A.WAIT_FOR_ACTIVATION, 3, 3, sent=SentMessages(after_step=120, activations=(0, 0), gradients=(0, 0))
    )
    for count, expected in ((3, frozenset()), (4, frozenset({whose[0]}))):
        counts[place] = count
        so_far = SentMessages(after_step=120, activations=tuple(counts), gradients=(0, 0))
        assert never_sent([replace(one, sent=so_far), other], neighbours) == expected


def test_who_left_a_message_out_is_named_although_it_waits_for_its_receiver_in_turn() -> None:
    seen = [at(0, A.WAIT_FOR_GRADIENT, 0, 6, sent=sent(7, 0)), at(1, A.WAIT_FOR_ACTIVATION, 1, 6, sent=sent(0, 6))]
    flights = {rank: record(rank, members=(0, 1)) for rank in (0, 1)}
    told = analyse(with_stage_waits(flights, seen, TWO), (0, 1), (), never_sent(seen, TWO))
    assert told.ranks == (0,)
    assert "rank 0 never sent the activation of micro-batch 6 from rank 0 to rank 1" in told.reason
    assert analyse(with_stage_waits(flights, seen, TWO), (0, 1)).culprits == ()


def test_who_waits_around_a_ring_waits_for_the_rank_before_it() -> None:
    seen = [at(rank, A.WAIT_IN_RING, (rank - 1) % 4, -1) for rank in range(4)]
    seen[2] = at(2, None, 0)
    told = found(seen, StageNeighbours(PipelineConfig(), 4))
    assert (told.kind, told.ranks) == ("missing", (2,))
    assert "rank 2 never sent the message with keys and values from rank 2 to rank 3" in told.reason
    assert str(seen[1].moment) == "waits for keys and values of rank 0"


def test_rings_within_stages_lead_to_the_one_that_holds_up_both() -> None:
    seen = [
        at(0, A.FORWARD, 0), at(1, A.WAIT_IN_RING, 0, -1),
        at(2, A.WAIT_FOR_ACTIVATION, 1), at(3, A.WAIT_FOR_ACTIVATION, 1),
    ]  # fmt: skip
    assert found(seen, PAIRS).ranks == (0,)


def test_nccls_records_hold_their_own_messages() -> None:
    seen = [at(0, A.FORWARD, 0), at(1, A.WAIT_FOR_ACTIVATION, 1)]
    (first,) = with_stage_waits({1: record(1)}, seen, TWO)
    assert [(one.source, one.target, one.sends) for one in first.messages] == [(0, 1, False)]
    own = replace(first, messages=(replace(first.messages[0], group="nccl"),))
    assert with_stage_waits({1: own}, seen, TWO) == [own]


def test_without_records_who_waits_for_a_stage_is_not_the_one_that_is_behind() -> None:
    seen = [
        at(0, A.WAIT_FOR_GRADIENT, 0, 0, collective=9), at(1, A.BACKWARD, 1, 0, phase="backward", collective=9),
        at(2, A.WAIT_FOR_ACTIVATION, 2, 2, collective=1), at(3, A.WAIT_FOR_ACTIVATION, 3, 1, collective=0),
    ]  # fmt: skip
    told = judge(seen, Finding(kind="none", reason="no records"), Limits(HangConfig(), {}))
    assert (told.verdict, told.culprit, told.kind) == (HangVerdict.HUNG, 1, HangKind.STUCK_IN_COMPUTE)
    assert "it has been in backward (micro-batch 0, stage 1) after step 120 for 9.5 s" in told.reason


def plays(layout: str, seed: int, *, records: bool) -> None:
    watch, bad = legal_hour(seed, records=records, job=LAYOUTS[layout](seed))
    assert bad is None, f"{layout}, seed {seed}, records {records}, after {watch.now:.0f} s: {bad.reason}"
    assert watch.now >= 3600
    assert watch.judged[HangVerdict.LOOK] > 5  # it was slow indeed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hours_in_which_everything_is_slow_that_may_be(layout: str) -> None:
    plays(layout, 1, records=layout != "pipeline")


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", range(10))
def test_four_hundred_hours_of_each_layout(
    block: int, layout: str, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(100 + block * 20, 120 + block * 20):
        for records in (True, False):
            plays(layout, seed, records=records)
    record_property(f"simulated hours without a false alarm ({layout})", 40)


LATER = {"experts": 5.0}
"""Seconds: where ordinary passes last for seconds, nobody looks closer as soon."""
HANGS = ("stopped", "dead", "data", "save", "forward", "backward", "spinning", "lock")


def is_named(layout: str, what: str, seed: int, *, records: bool) -> None:
    incident, found, now = stage(seed, what, records=records, job=LAYOUTS[layout](seed))
    told = f"{layout}, seed {seed}, {what}, records {records}: {incident}, {found}"
    assert found is not None, told
    assert (found.culprit, found.kind) == (incident.culprit, incident.kind), told
    assert incident.began < now <= incident.due + LATER.get(layout, 0.0), f"{told}, at {now}"


@pytest.mark.parametrize("what", HANGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_hangs_is_named_in_time(layout: str, what: str) -> None:
    for seed in range(2):
        is_named(layout, what, seed, records=seed == 0 or layout == "experts")


@pytest.mark.proof
@pytest.mark.parametrize("what", HANGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hundreds_who_hang_are_named_in_time(
    layout: str, what: str, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(1000, 1050):
        # Who waits for whom in an exchange only records show.
        for records in (True,) if layout == "experts" else (True, False):
            is_named(layout, what, seed, records=records)
    record_property(
        f"simulated hangs ({layout}, {what}) with the right culprit, kind and time", 50 if layout == "experts" else 100
    )
