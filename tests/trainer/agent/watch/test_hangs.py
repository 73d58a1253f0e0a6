"""Who stopped first, and whether it has exceeded its own limit: tables, properties, and jobs on a made-up clock."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.agent.watch.stalls import STAGED, legal_hour, stage
from trainer.agent.flight.wait_graph import BlockingRank, Finding
from trainer.agent.watch.declare_hang import FRESH, LOOK_AT_HALTED, HangJudgement, HangVerdict, judge
from trainer.agent.watch.hang_limits import HALTED, Limits, RankSample
from trainer.agent.watch.waiting_ranks import HangKind
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.rank_progress.progress import Phase

P99 = {"data": 0.05, "forward": 0.3, "backward": 0.3, "optimizer": 0.1}
LIMITS = Limits(HangConfig(), P99)
NOTHING = Finding(kind="none", reason="no rank waits inside a collective")


def at(rank: int, phase: str = "optimizer", age: float = 9.5, **fields: Any) -> RankSample:
    known = {"rank": rank, "node": f"n{rank // 4}", "phase": phase, "step": 120, "first": False, "age": age}
    return RankSample(**{**known, "alive": age, "state": "S", **fields})


def crew(*others: RankSample, world: int = 8, **fields: Any) -> list[RankSample]:
    """A job whose ranks wait in the optimizer's all-reduce, but for `others`."""
    special = {one.rank: one for one in others}
    return [special.get(rank, at(rank, **fields)) for rank in range(world)]


def missing(*ranks: int) -> Finding:
    return Finding(kind="missing", ranks=ranks, reason=f"ranks {ranks} never entered collective #4 of group 0")


def together(*ranks: int) -> Finding:
    return Finding(kind="stuck_together", ranks=ranks, reason="all are inside collective #4 of group 0")


def desync(*ranks: int) -> Finding:
    return Finding(kind="desync_shape", ranks=ranks, reason="collective #4 of group 0 has sizes [4] here, [8] there")


HANGS = [
    # The state of a process needs no interpretation, and no records.
    (crew(at(5, "forward", 4.1, state="T"), age=4.1), None, 5, HangKind.STOPPED,
    "rank 5 on n1 stopped first: it has been "
     "in forward after step 120 for 4.1 s, longer than the 3.0 s that a halted process may take; 7 ranks wait for it; "
     "its process is stopped (SIGSTOP)"),
    (crew(at(5, "forward", state="Z")), None, 5, HangKind.DEAD, "its process is dead (state Z)"),
    (crew(at(5, "forward", state="T"), at(6, "data")), missing(6), 5, HangKind.STOPPED, "(SIGSTOP)"),
    (crew(at(5, state="T"), at(6, state="Z")), None, 6, HangKind.DEAD, "state Z"),
    (crew(at(5, state="T", alive=5.0), at(6, state="T", alive=9.0)), None, 6, HangKind.STOPPED, "(SIGSTOP)"),
    # Then what the ranks themselves have recorded.
    (crew(at(5)), missing(5), 5, HangKind.STUCK_IN_COMPUTE, "never entered collective #4"),
    (crew(at(5, "data"), at(3, "data")), missing(5), 5, HangKind.STUCK_IN_DATA, "never entered"),
    (crew(at(5, "forward"), at(3, "data")), missing(3, 5), 3, HangKind.STUCK_IN_DATA, "never entered"),
    (crew(at(5, "forward")), desync(3), 3, HangKind.DESYNC, "has sizes [4] here, [8] there"),
    (crew(), replace(desync(3, 4), kind="desync_order"), 3, HangKind.DESYNC, "collective #4"),
    (crew(), together(*range(8)), None, HangKind.NETWORK,
    "no rank stopped first: all are inside collective #4 of group 0"
     "; no rank has made progress for 9.5 s, longer than the 8.0 s that optimizer may take; "
     "the network between n0, n1 is suspect"),
    (crew(), together(4, 5, 6, 7), None, HangKind.UNKNOWN, "all of these ranks are on n1"),
    # Then what each was doing: the one that is furthest behind is waited for.
    (crew(at(5, "data")), NOTHING, 5, HangKind.STUCK_IN_DATA, "rank 5 on n1 stopped first: it has been in "
     "data after step 120 for 9.5 s, longer than the 8.0 s that data may take; 7 ranks wait for it; it is furthest "
     "behind"),
    (crew(at(5, "data"), at(3, "forward")), NOTHING, 5, HangKind.STUCK_IN_DATA, "furthest behind"),
    (crew(at(5, "checkpoint", 130.0), age=130.0), NOTHING, 5, HangKind.STUCK_IN_SAVE, "the 120 s that checkpoint may"),
    (crew(at(5, step=119)), NOTHING, 5, HangKind.STUCK_IN_COMPUTE, "after step 119"),
    (crew(at(5, step=119), at(2, "data")), NOTHING, 5, HangKind.STUCK_IN_COMPUTE, "after step 119"),
    (crew(at(5, "backward", collective=40), phase="forward", collective=42), NOTHING, 5, HangKind.STUCK_IN_COMPUTE,
     "in backward"),  # of the micro-batch before
    (crew(at(5, "forward"), phase="backward"), NOTHING, 5, HangKind.STUCK_IN_COMPUTE, "in forward"),
    (crew(at(5, age=12.0)), NOTHING, 5, HangKind.UNKNOWN, "of 8 ranks at the same place, it has been there longest"),
    (crew(at(5, "data", 12.0), phase="data"), NOTHING, 5, HangKind.STUCK_IN_DATA, "of 8 ranks at the same place"),
    (crew(at(5)), missing(77), 0, HangKind.UNKNOWN, "of 8 ranks"),  # the one that is named has ended
    # Alone, too.
    ([at(0, "data")], NOTHING, 0, HangKind.STUCK_IN_DATA, "no ranks wait for it"),
    (crew(at(1, "data"), world=2), NOTHING, 1, HangKind.STUCK_IN_DATA, "1 rank waits for it"),
    ([at(0, "data", first=True, age=121.0)], NOTHING, 0, HangKind.STUCK_IN_DATA, "before the end of its first step"),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "finding", "culprit", "kind", "words"), HANGS)
def test_a_hang_its_culprit_and_its_reason(seen, finding, culprit, kind, words):
    judgement = judge(seen, finding, LIMITS)
    assert judgement.verdict is HangVerdict.HUNG
    assert (judgement.culprit, judgement.kind) == (culprit, kind)
    assert words in judgement.reason
    named = [one for one in seen if one.rank == culprit]
    assert [(judgement.node, judgement.phase, judgement.step)] * len(named) == [
        (one.node, one.phase, one.step) for one in named
    ]


FINE = [
    ([], None, "all ranks have ended"),
    (crew(ended=True), NOTHING, "all ranks have ended"),
    (crew(at(3, age=0.3)), None, "rank 3 moved 0.30 s ago"),
    (crew(at(3, age=3.2)), None, "rank 3 moved 3.2 s ago; no check is due before 4.0 s"),
    # A peer in a legal slow phase: nobody is blamed for waiting.
    (crew(at(0, "checkpoint", 60.0), age=60.0), missing(0), "rank 0 on n0 has been in checkpoint after step 120 for "
     "60 s, within the 120 s that checkpoint may take; 7 ranks wait for it"),
    (crew(at(0, "eval", 300.0, alive=0.4), age=300.0), NOTHING, "rank 0 on n0 has been in eval"),
    (crew(at(0, "compile", 1200.0, alive=0.4, first=True), age=1200.0, first=True), NOTHING, "compile"),
    (crew(at(0, "checkpoint", 900.0, state="D"), age=900.0), NOTHING, "may wait for a disk"),
    (crew(at(0, "forward", 20.0, alive=0.3), age=20.0), missing(0), "rank 0 on n0 has been in forward"),
    (crew(at(5, "data"), at(0, "checkpoint")), missing(0, 5), "rank 0 on n0 has been in checkpoint"),
    # Some wait in the same phase in which one still works.
    (crew(at(5, "eval", 200.0, alive=0.4), age=200.0, phase="eval"), NOTHING, "has been in eval"),
    (crew(at(5, "data", 9.5, alive=0.4), phase="data"), missing(*range(8)), "has been in data"),
    (crew(at(5, "eval", 9.5)), together(*range(8)), "no rank stopped first: all are inside collective #4"),
    # A debugger has somebody with it; a stopped process has its three seconds.
    (crew(at(5, "data", 600.0, state="t"), age=600.0), NOTHING, "a debugger may hold it"),
    (crew(at(5, age=600.0, state="t"), at(2, "data", 600.0), age=600.0), NOTHING, "a debugger may hold it"),
    (crew(at(5, "data", 2.5, state="T"), age=2.5), NOTHING, "rank 5 on n1 has been in data"),
    ([at(0, "data", 6.0, state="T")], NOTHING, "the 8.0 s that data may take"),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "finding", "words"), FINE)
def test_what_is_no_hang_and_why(seen, finding, words):
    judgement = judge(seen, finding, LIMITS)
    assert judgement.verdict is HangVerdict.FINE, judgement.reason
    assert words in judgement.reason
    assert judgement.culprit is None
    assert judgement.waiting == ()


LOOKS: list[tuple[Sequence[RankSample], Finding | None, dict[str, Any], str]] = [
    (crew(age=4.0), None, {}, "no rank has moved for 4.0 s"),
    (crew(), None, {}, "no rank has moved for 9.5 s"),
    (crew(at(5, age=1.1, state="T"), age=1.2), None, {}, "no rank has moved for 1.1 s"),
    (crew(at(5, "data")), missing(5), {"found": 9.6}, "no rank has moved"),  # somebody has, since they were asked
    (crew(at(5, "data")), missing(5), {"found": FRESH + 1}, "the flight records are 6.0 s old"),
    (crew(at(5, "data", 7.0), age=7.0), missing(5), {"found": 4.5}, "a limit expires in 1.0 s"),
]


@pytest.mark.parametrize(("seen", "finding", "more", "words"), LOOKS)
def test_when_records_are_asked_for(seen, finding, more, words):
    judgement = judge(seen, finding, LIMITS, **more)
    assert judgement.verdict is HangVerdict.LOOK
    assert words in judgement.reason


def test_a_node_is_named_without_a_rank_only_when_all_of_it_is_there():
    assert judge(crew(), together(*range(8)), LIMITS).node is None
    assert judge(crew(), together(4, 5, 6, 7), LIMITS).node == "n1"


def test_pythons_lock_is_named_and_breaks_a_tie():
    judgement = judge(crew(at(5, "forward")), missing(5), LIMITS, lock_held={5})
    assert (judgement.culprit, judgement.kind) == (5, HangKind.LOCK_HELD)
    assert "nothing can run in its interpreter (Python's lock is held)" in judgement.reason
    judgement = judge(crew(at(2, age=11.0)), NOTHING, LIMITS, lock_held={5})
    assert (judgement.culprit, judgement.kind) == (5, HangKind.LOCK_HELD)
    judgement = judge(crew(at(2, "data")), NOTHING, LIMITS, lock_held={5})
    assert (judgement.culprit, judgement.kind) == (2, HangKind.STUCK_IN_DATA)


def test_a_waiting_rank_that_a_profiler_halts_for_a_moment_is_not_blamed():
    saving = crew(at(0, "checkpoint", 60.0), at(5, age=60.0, state="T"), age=60.0)
    assert judge(saving, NOTHING, LIMITS, halted_for={5: 0.2}).verdict is HangVerdict.FINE
    assert judge(saving, NOTHING, LIMITS, halted_for={5: 1.2}).culprit == 5


def roots(*ranks: int, kind: Any = "never_came") -> Finding:
    each = [BlockingRank(rank=rank, kind=kind, group="0", sequence=4, reason=f"rank {rank}") for rank in ranks]
    return Finding(kind="missing", ranks=ranks, reason="each never came", culprits=tuple(each), chain="1, behind 2")


def test_all_roots_are_named_that_have_exceeded_their_own_limits():
    seen = crew(at(2, "data", 12.0), at(5, "forward", 10.0), at(6, "compile", 60.0), age=9.5)
    judgement = judge(seen, roots(2, 5, 6), LIMITS, lock_held={5})
    assert (judgement.culprit, judgement.node) == (2, "n0")
    assert [(one.rank, one.node, one.kind) for one in judgement.culprits] == [
        (2, "n0", "stuck_in_data"), (5, "n1", "lock_held")
    ]  # fmt: skip
    assert judgement.waiting == (0, 1, 3, 4, 6, 7)
    assert judgement.chain == "1, behind 2"
    assert judgement.reason.startswith(
        "2 ranks stopped independently: rank 2 on n0 in data after step 120 for 12 s, rank 5 on n1 in forward"
    )
    assert "; 6 ranks wait for them; " in judgement.reason


def test_where_a_stopped_gpus_host_stands_says_nothing():
    judgement = judge(crew(at(5, "data")), roots(4, 5, kind="gpu_stopped"), LIMITS, on_gpus=True)
    assert [(one.rank, one.kind) for one in judgement.culprits] == [(5, "stuck_in_compute"), (4, "stuck_in_compute")]


def test_all_processes_that_are_halted_are_named():
    seen = crew(at(2, state="T"), at(5, state="T"), at(6, state="Z"))
    judgement = judge(seen, NOTHING, LIMITS, halted_for={2: 5.0, 5: 5.0, 6: 0.2})
    assert [(one.rank, one.kind) for one in judgement.culprits] == [(2, "stopped"), (5, "stopped")]


def test_time_in_which_nothing_was_heard_of_a_node_does_not_count():
    seen = crew(at(5, "data", 40.0), age=40.0)
    lasting = judge(seen, missing(5), LIMITS, report_gaps={"n1": [(39.5, 0.0)]})
    assert (lasting.verdict, lasting.reason) == (
        HangVerdict.FINE, "n1 has not reported for 40 s; its ranks may be moving"
    )  # fmt: skip
    assert judge(seen, missing(5), LIMITS, report_gaps={"n1": [(36.0, 1.0)]}).verdict is HangVerdict.FINE
    assert judge(seen, missing(5), LIMITS, report_gaps={"n1": [(36.0, 5.0)]}).culprit == 5
    assert judge(seen, missing(5), LIMITS, report_gaps={"n7": [(36.0, 1.0)]}).culprit == 5


# -- properties

phases = st.sampled_from([phase.name.lower() for phase in Phase])
seconds = st.one_of(st.floats(0, 20), st.floats(0, 5000))


@st.composite
def sightings(draw: st.DrawFn) -> list[RankSample]:
    seen = []
    for rank in range(draw(st.integers(1, 6))):
        age = draw(seconds)
        seen.append(
            RankSample(
                rank=rank, node=f"n{draw(st.integers(0, 2))}", step=draw(st.integers(0, 2)), phase=draw(phases),
                first=draw(st.booleans()), collective=draw(st.integers(0, 3)), age=age,
                alive=age * draw(st.sampled_from([0.0, 0.5, 1.0])), state=draw(st.sampled_from("SSSSRDTtZ")),
                ended=draw(st.integers(0, 5)) == 0,
            )
        )  # fmt: skip
    return seen


ranks = st.lists(st.integers(0, 7), unique=True, max_size=6).map(tuple)
kinds = st.sampled_from(["none", "missing", "desync_shape", "desync_order", "stuck_together"])
findings = st.none() | st.builds(Finding, kind=kinds, ranks=ranks, reason=st.just("records"))
config = HangConfig()


def live(seen: Sequence[RankSample]) -> dict[int, RankSample]:
    return {one.rank: one for one in seen if not one.ended}


@given(sightings(), findings, seconds)
def test_only_who_was_seen_long_enough_is_blamed(seen, finding, found):
    judgement = judge(seen, finding, LIMITS, found=found)
    if judgement.verdict is not HangVerdict.HUNG:
        return
    there = live(seen)
    blamed = [there[judgement.culprit]] if judgement.culprit is not None else list(there.values())
    if judgement.culprit is None:
        assert finding.kind == "stuck_together"
        blamed = [one for one in blamed if one.rank in finding.ranks] or blamed
    for one in blamed:
        assert one.age >= (config.stopped if one.state in HALTED and len(there) > 1 else config.least)
        assert one.age >= judgement.limit
        # Who has moved since the records were asked for is not judged by them.
        assert one.age >= found or one.state in HALTED
    assert min(one.age for one in there.values()) >= LOOK_AT_HALTED


@given(sightings(), findings)
def test_the_culprit_and_those_that_wait_are_all_that_live(seen, finding):
    judgement = judge(seen, finding, LIMITS)
    if judgement.verdict is HangVerdict.HUNG:
        culprit = [one.rank for one in judgement.culprits]
        assert sorted([*culprit, *judgement.waiting]) == sorted(live(seen))
        assert culprit[:1] == ([] if judgement.culprit is None else [judgement.culprit])
        if culprit:
            one = live(seen)[culprit[0]]
            assert (judgement.node, judgement.phase, judgement.step) == (one.node, one.phase, one.step)


@given(sightings(), findings, st.randoms(use_true_random=False))
def test_neither_the_order_nor_those_that_ended_matter(seen, finding, random):
    shuffled = list(live(seen).values())
    random.shuffle(shuffled)
    first, second = judge(seen, finding, LIMITS), judge(shuffled, finding, LIMITS)
    assert (first.verdict, first.culprit, first.kind, first.limit) == (
        second.verdict, second.culprit, second.kind, second.limit
    )  # fmt: skip


@given(sightings(), findings, st.floats(0, 100), st.floats(0, 100))
def test_silence_never_makes_a_hang(seen, finding, began, ended):
    gaps = {"n0": [(max(began, ended), min(began, ended))]}
    if judge(seen, finding, LIMITS, report_gaps=gaps).verdict is HangVerdict.HUNG:
        assert judge(seen, finding, LIMITS).verdict is HangVerdict.HUNG


@given(sightings(), findings)
def test_nobody_is_killed_without_a_look_at_the_records(seen, finding):
    if judge(seen, None, LIMITS).verdict is HangVerdict.HUNG:
        assert any(one.state in HALTED for one in live(seen).values())


# -- jobs on a made-up clock


def plays(seed: int, records: bool) -> None:
    watch, bad = legal_hour(seed, records=records)
    assert bad is None, f"seed {seed}, records {records}, after {watch.now:.0f} s: {bad.reason}"
    assert watch.now >= 3600
    assert watch.judged[HangVerdict.LOOK] > 5  # it was slow indeed


# One seed with records and one without; the others are with the long counts.
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.proof) for seed in range(6)])
def test_hours_in_which_everything_is_slow_that_may_be(seed: int) -> None:
    plays(seed, records=seed % 2 == 0)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(20))
def test_four_hundred_hours_in_which_everything_is_slow_that_may_be(
    block: int, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(100 + block * 10, 110 + block * 10):
        for records in (True, False):
            plays(seed, records=records)
    record_property("simulated hours without a false alarm", 20)


def hangs(seed: int, what: str, records: bool) -> None:
    incident, found, now = stage(seed, what, records=records)
    told = f"seed {seed}, {what}, records {records}: {incident}, {found}"
    assert found is not None, told
    assert (found.culprit, found.kind) == (incident.culprit, incident.kind), told
    assert incident.began < now <= incident.due, f"{told}, at {now}"


def seen_with(what: str) -> Sequence[bool]:
    """Only records show that ranks call different collectives, or that all of them have joined."""
    return (True,) if what in ("desync", "network") else (True, False)


@pytest.mark.parametrize("what", STAGED)
def test_staged_hangs_are_named_in_time(what: str) -> None:
    for seed in range(6):
        for records in seen_with(what):
            hangs(seed, what, records)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", STAGED)
def test_hundreds_of_staged_hangs_are_named_in_time(what: str, record_property: Callable[[str, object], None]) -> None:
    count = 0
    for seed in range(1000, 1200):
        for records in seen_with(what):
            hangs(seed, what, records)
            count += 1
    record_property(f"simulated hangs ({what}) with the right culprit, kind and time", count)


def test_a_judgement_of_nothing_is_empty() -> None:
    assert judge([], None, LIMITS) == HangJudgement(verdict=HangVerdict.FINE, reason="all ranks have ended")


@pytest.mark.parametrize(("group", "on_gpus", "verdict"), [
    ("0", True, HangVerdict.HUNG), ("0", False, HangVerdict.FINE), ("0 on the host", True, HangVerdict.FINE),
])  # fmt: skip
def test_spinning_for_a_collective_of_gpus_is_no_sign_of_life(group, on_gpus, verdict):
    seen = [at(rank, "init", 500.0, alive=0.1, first=True) for rank in range(8)]
    finding = replace(together(*range(8)), group=group)
    assert judge(seen, finding, LIMITS, on_gpus=on_gpus).verdict is verdict


def test_where_the_host_stands_says_nothing_about_what_hangs_on_its_gpu():
    finding = replace(missing(5), queued=True)
    found = judge(crew(at(5, "data", 40.0, alive=0.1), age=40.0, alive=0.1), finding, LIMITS, on_gpus=True)
    assert (found.verdict, found.culprit, found.kind) == (HangVerdict.HUNG, 5, HangKind.STUCK_IN_COMPUTE)
