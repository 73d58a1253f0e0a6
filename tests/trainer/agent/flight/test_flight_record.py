"""What flight records say together: tables of records, NCCL's as torch writes them, and what holds of all."""

import base64
import json
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.warm_programs import WarmPrograms
from trainer.agent.flight.analysis import analyse
from trainer.agent.flight.flight_record import WIRE, FlightRecord, Group, newest, parse
from trainer.agent.flight.wait_graph import Finding
from trainer.protocol.messages.ranks import decode_runs, encode_runs


def call(group: str, number: int, op: str = "gloo:all_reduce", size: int = 4, **over: Any) -> dict[str, Any]:
    """One entry as torch 2.13 writes it, over unless `over` says else."""
    return {
        "collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [[size]], "is_p2p": False,
        "op_id": number, "output_dtypes": ["Float"], "output_sizes": [[size]], "p2p_seq_id": 0, "pg_id": int(group),
        "process_group": [group, "default_pg" if group == "0" else "undefined"], "profiling_name": op,
        "record_id": number, "retired": True, "state": "scheduled", "time_created_ns": 1, "timeout_ms": 6000, **over,
    }  # fmt: skip


def flight(
    rank: int, *entries: dict[str, Any], groups: Mapping[str, Iterable[int]] | None = None, **over: Any
) -> FlightRecord:
    dump = {"version": "2.10", "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}}, "entries": entries, **over}
    told = {key: {"name": key, "desc": "", "runs": encode_runs(ranks)} for key, ranks in (groups or {}).items()}
    return parse(rank, json.dumps(dump), told)


def history(group: str, last: int, *, inside: bool, **over: Any) -> list[dict[str, Any]]:
    """Collectives 1 to `last` of a group; the last one unfinished when `inside`."""
    entries = [call(group, number, **over) for number in range(1, last + 1)]
    if inside:
        entries[-1]["retired"] = False
    return entries


def inside(*calls: int, done: tuple[int, ...] = ()) -> list[FlightRecord]:
    """Records of ranks that have called so many collectives; those in `done` have completed all of them."""
    return [flight(rank, *history("0", last, inside=rank not in done)) for rank, last in enumerate(calls)]


SIMPLE: dict[str, tuple[list[FlightRecord], tuple[int, ...], tuple[str, tuple[int, ...], int], str]] = {
    "no rank waits": (inside(5, 5, done=(0, 1)), (), ("none", (), 0), "no rank waits inside a collective"),
    "no records": ([], (0, 1), ("none", (), 0), "no rank waits inside a collective; ranks 0 and 1 did not answer"),
    "a rank never came": (inside(4, 3, 4, 4, done=(1,)), (), ("missing", (1,), 4), "rank 1 never entered"),
    "a rank has no record of the group": ([*inside(1), flight(1)], (), ("missing", (1,), 1), "rank 1 never entered"),
    # The root of a broadcast has completed it before the others, and waits in the next collective.
    "a rank is ahead": (inside(5, 4, 3, done=(2,)), (), ("missing", (2,), 4), "rank 2 never entered"),
    "a rank is silent": ([one for one in inside(4, 4, 4, 4) if one.rank != 2], (2,), ("missing", (2,), 4),
        "rank 2 did not answer, and all others have entered collective #4 of group 0 (all_reduce of 4 Float), "
        "in which ranks 0, 1 and 3 wait"),
    "all are inside": (inside(4, 4, 4), (), ("stuck_together", (0, 1, 2), 4), "no rank is missing"),
}  # fmt: skip


@pytest.mark.parametrize(("flights", "silent", "found", "words"), SIMPLE.values(), ids=SIMPLE)
def test_the_rank_that_others_wait_for(flights, silent, found, words) -> None:
    finding = analyse(flights, range(max([*silent, *(one.rank for one in flights)]) + 1), silent)
    assert (finding.kind, finding.ranks, finding.sequence) == found
    assert words in finding.reason


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (call("0", 4, size=9, retired=False), "desync_shape"),
        (call("0", 4, input_dtypes=["Double"], retired=False), "desync_shape"),
        (call("0", 4, op="gloo:broadcast", retired=False), "desync_order"),
        (call("0", 4, op="gloo:barrier", input_sizes=[], retired=False), "desync_order"),
    ],
)
def test_a_minority_that_did_something_else(odd: dict[str, Any], kind: str) -> None:
    before = history("0", 3, inside=False)
    flights = [flight(rank, *before, odd if rank == 2 else call("0", 4, retired=False)) for rank in range(4)]
    finding = analyse(flights, range(4))
    assert (finding.kind, finding.ranks, finding.sequence) == (kind, (2,), 4)
    assert "rank 2 entered" in finding.reason
    assert "ranks 0, 1 and 3 entered all_reduce of 4 Float" in finding.reason


@pytest.mark.parametrize(
    ("before", "sizes", "ranks", "words"),
    [
        (3, (9, 4), (0,), "the others have made such calls before"),
        (0, (9, 5), (0, 1), "the records do not show which of them is wrong"),
    ],
)
def test_of_two_ranks_the_one_whose_call_is_new_is_wrong(before, sizes, ranks, words) -> None:
    earlier = history("0", before, inside=False)
    finding = analyse(
        [flight(at, *earlier, call("0", before + 1, size=size)) for at, size in enumerate(sizes)], range(2)
    )
    assert (finding.kind, finding.ranks) == ("desync_shape", ranks)
    assert finding.reason.endswith(words)


def test_views_of_as_many_elements_agree() -> None:
    flights = [
        flight(0, call("0", 1, input_sizes=[[2, 2]], retired=False)),
        flight(1, call("0", 1, input_sizes=[[4]], retired=False)),
    ]
    assert analyse(flights, range(2)).kind == "stuck_together"


@pytest.mark.parametrize("op", ["gloo:all_to_all", "nccl:all_to_all", "gloo:scatter", "gloo:gather"])
def test_uneven_calls_that_are_legal(op: str) -> None:
    flights = [flight(rank, call("0", 1, op=op, size=rank + 1, retired=False)) for rank in range(2)]
    assert analyse(flights, range(2)).kind == "stuck_together"


def test_a_difference_that_is_long_over_explains_nothing() -> None:
    flights = [flight(rank, call("0", 1, size=rank + 1), *history("0", 4, inside=rank == 0)[1:]) for rank in range(2)]
    assert analyse(flights, range(2)).kind == "stuck_together"


GROUPS = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}


def mesh(rank: int, tp: tuple[int, bool], dp: tuple[int, bool]) -> FlightRecord:
    """A rank of a 2 x 2 world: (collectives entered, still inside) in its tensor and data parallel group."""
    (tp_key, tp_ranks), (dp_key, dp_ranks) = (
        next((f"{place}{index}", ranks) for index, ranks in enumerate(GROUPS[name]) if rank in ranks)
        for name, place in (("tp", "1"), ("dp", "2"))
    )
    entries = [*history(tp_key, tp[0], inside=tp[1]), *history(dp_key, dp[0], inside=dp[1])]
    return flight(rank, *entries, groups={tp_key: tp_ranks, dp_key: dp_ranks})


def test_the_wave_front_is_where_the_missing_wait_nowhere() -> None:
    flights = [
        mesh(0, tp=(5, True), dp=(2, False)),
        mesh(1, tp=(4, False), dp=(2, False)),
        mesh(2, tp=(5, False), dp=(3, True)),
        mesh(3, tp=(5, False), dp=(3, True)),
    ]
    finding = analyse(flights, range(4))
    assert (finding.kind, finding.ranks, finding.group, finding.sequence) == ("missing", (1,), "10", 5)


def test_a_silent_rank_behind_others_that_wait() -> None:
    flights = [
        mesh(0, tp=(5, True), dp=(2, False)),
        mesh(2, tp=(5, False), dp=(3, True)),
        mesh(3, tp=(5, False), dp=(3, True)),
    ]
    finding = analyse(flights, range(4), [1])
    assert (finding.kind, finding.ranks, finding.group) == ("missing", (1,), "10")


def test_groups_entered_in_different_orders() -> None:
    groups = {"1": [0, 1], "2": [0, 1]}
    flights = [
        flight(0, *history("1", 3, inside=True), *history("2", 2, inside=False), groups=groups),
        flight(1, *history("1", 2, inside=False), *history("2", 3, inside=True), groups=groups),
    ]
    finding = analyse(flights, range(2))
    assert finding.kind == "desync_order"
    assert finding.ranks
    assert finding.reason.endswith("they entered the collectives of two groups in different orders")


def test_ranks_that_wait_in_a_ring() -> None:
    rings = {"1": [0, 1], "2": [1, 2], "3": [2, 0]}
    flights = []
    for rank, (own, other) in enumerate((("1", "3"), ("2", "1"), ("3", "2"))):
        told = {key: rings[key] for key in (own, other)}
        flights.append(flight(rank, *history(own, 3, inside=True), *history(other, 2, inside=False), groups=told))
    finding = analyse(flights, range(3))
    assert finding.kind == "stuck_together"
    assert finding.reason.endswith("the missing ranks wait for others themselves")


@pytest.mark.proof
def test_of_ten_thousand_the_one() -> None:
    flights = []
    for rank in range(10_000):
        tp, dp = 10_000 + rank // 8, 20_000 + rank % 8
        late = rank == 4_321
        entries = [call("0", 7), call(str(tp), 8, retired=late or rank // 8 != 540), call(str(dp), 9)]
        groups = {
            "0": range(10_000),
            str(tp): range(rank // 8 * 8, rank // 8 * 8 + 8),
            str(dp): range(rank % 8, 10_000, 8),
        }
        entries[1]["collective_seq_id"] -= late
        entries[2]["retired"] = rank % 8 != 4_321 % 8 or rank // 8 == 540
        entries[2]["collective_seq_id"] -= rank // 8 == 540
        known = {key: Group(tuple(ranks), 0, 0) for key, ranks in groups.items()}
        one = flight(rank, *entries)
        merged = {key: replace(one.groups[key], ranks=known[key].ranks) for key in one.groups}
        flights.append(replace(one, groups=merged))
    began = time.process_time()
    finding = analyse(flights, range(10_000))
    assert (finding.kind, finding.ranks, finding.group) == ("missing", (4_321,), "10540")
    assert finding.reason.endswith("in which ranks 4320, 4322, 4323, 4324, 4325, 4326 and 4327 wait")
    assert time.process_time() - began < 20, "a second is usual; quadratic work takes minutes"


def test_a_group_whose_ranks_nobody_told_is_made_of_those_that_have_it() -> None:
    flights = [
        flight(rank, *history("0", 3, inside=False), *history("7", 2 - rank, inside=rank == 0)) for rank in (0, 1)
    ]
    flights += [flight(2, *history("0", 3, inside=False))]
    finding = analyse(flights, range(3))
    assert (finding.kind, finding.ranks, finding.group) == ("missing", (1,), "7")


# -- the records of NCCL: shaped after torch's own tests of its analyser, not recorded on a GPU


def nccl(rank: int, states: list[str], **over: Any) -> FlightRecord:
    entries = [
        call("0", number + 1, op="nccl:all_reduce", state=state, retired=state == "completed",
             duration_ms=1.5, frames=[{"name": "f", "filename": "g.py", "line": 3}])
        for number, state in enumerate(states)
    ]  # fmt: skip
    dump = {
        "version": "2.10", "entries": entries, "comm_lib_version": "2.27.3", "nccl_comm_state": {},
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}},
        "pg_status": {"0": {"last_enqueued_collective": len(states), "last_started_collective": 1,
                            "last_completed_collective": 1}}, **over,
    }  # fmt: skip
    return parse(rank, json.dumps(dump))


def test_nccl_many_are_queued_behind_the_first_that_hangs() -> None:
    flights = [nccl(0, ["completed", "started", "scheduled", "scheduled"])]
    flights += [nccl(1, ["completed", "started", "scheduled"]), nccl(2, ["completed"])]
    finding = analyse(flights, range(3))
    assert (finding.kind, finding.ranks, finding.sequence) == ("missing", (2,), 2)
    assert flights[0].groups["0"].ranks == (0, 1, 2)


def test_nccl_a_collective_behind_other_work_on_the_gpu() -> None:
    flights = [
        nccl(0, ["completed", "started"]),
        nccl(1, ["completed", "scheduled"]),
        nccl(2, ["completed", "started"]),
    ]
    finding = analyse(flights, range(3))
    assert (finding.kind, finding.ranks) == ("missing", (1,))
    assert "queued behind other work on the GPU" in finding.reason


def test_nccl_coalesced_calls_of_one_number_are_not_compared() -> None:
    two = [call("0", 1, op="nccl:all_gather", size=size, state="started", retired=False) for size in (4, 9)]
    one = [call("0", 1, op="nccl:coalesced", size=4, state="started", retired=False)]
    assert analyse([flight(0, *two), flight(1, *one)], range(2)).kind == "stuck_together"


# -- records of those that die, odd records, the wire


def test_what_failed_counts_as_unfinished_in_a_dying_ranks_record() -> None:
    flights = [
        flight(0, *history("0", 4, inside=False), failed=True),
        flight(1, *history("0", 3, inside=True), failed=False),
    ]
    finding = analyse(flights, range(2))
    assert (finding.kind, finding.ranks, finding.sequence) == ("missing", (1,), 4)


def test_what_two_ranks_send_each_other_is_no_collective() -> None:
    sending = call("0", 3, op="gloo:send 0->1", is_p2p=True, retired=False)
    one = flight(0, *history("0", 3, inside=False), sending)
    assert (one.groups["0"].entered, len(one.messages)) == (3, 1)
    # A rank that waits for another's message is not what the world waits for.
    flights = [one, flight(1, *history("0", 3, inside=False)), flight(2, *history("0", 4, inside=True))]
    assert analyse(flights, range(3)).ranks == (1,)


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '{"entries": 4}', "{"])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse(0, text)


def test_unknown_and_missing_fields_are_passed_over() -> None:
    entries = [{}, 5, {"collective_seq_id": "x"}, {"collective_seq_id": 2, "pg_id": 4, "new": 1}]
    one = parse(3, json.dumps({"entries": entries, "pg_config": [], "pg_status": None}))
    assert one.groups["4"].entered == 2


def test_the_wire_is_short_and_exact() -> None:
    small = flight(1, *history("0", 12, inside=True), groups={"0": list(range(8))})
    assert FlightRecord.from_json(small.to_json()) == small
    names = [str(number) for number in range(12)]
    big = flight(
        9_999,
        *[entry for name in names for entry in history(name, 2000 // 12, inside=True)],
        groups={name: list(range(0, 10_000, int(name) + 1)) for name in names},
    )
    text = big.to_json()
    assert len(text) <= WIRE
    back = FlightRecord.from_json(text)
    assert back.groups == big.groups
    assert {entry.group for entry in back.entries} == set(names)


EMPTY: dict[str, Any] = {"rank": 1, "timed": False, "whole": True, "groups": {}, "messages": [], "entries": []}
ENTRY = ["0", 1, "all_reduce", "4", 4, "Float", "scheduled", 0]


def wire(**over: Any) -> str:
    return base64.b85encode(zlib.compress(json.dumps({**EMPTY, **over}).encode())).decode()


def test_the_wire_refuses_garbage() -> None:
    assert FlightRecord.from_json(wire(entries=[ENTRY])).entries[0].op == "all_reduce"
    broken = [
        wire(rank=float("inf")), wire(groups={"0": [1]}), wire(messages=[["0", 1]]), wire(entries=[[*ENTRY[:-1], "0"]]),
        wire(entries=[ENTRY, ENTRY[:-1]]), wire(entries=[[*ENTRY, 1]]), wire(entries=None),
        wire(entries=[[1, *ENTRY[1:]]]), wire(rank=1, more="x" * (1 << 22)),
    ]  # fmt: skip
    for text in ("", "x", "{}", '{"rank": 1}', "\u1234", wire()[:-5], *broken):
        with pytest.raises(ValueError, match="not a flight record"):
            FlightRecord.from_json(text)


@given(st.sets(st.integers(0, 2000)))
def test_runs_hold_every_rank(ranks: set[int]) -> None:
    assert decode_runs(encode_runs(ranks)) == tuple(sorted(ranks))


def test_ranks_of_a_group_are_kept_once() -> None:
    told = [[0, 9_999, 1]]
    assert decode_runs(told) is decode_runs([list(run) for run in told])
    for wrong in ([[0, 10**12, 1]], [[1, 2]]):
        with pytest.raises(ValueError, match=r"."):
            decode_runs(wrong)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6), st.sets(st.integers(0, 5)))
def test_nobody_inside_is_ever_called_missing(states: list[tuple[int, bool]], silent: set[int]) -> None:
    flights = [
        flight(rank, *history("0", last, inside=inside and last > 0))
        for rank, (last, inside) in enumerate(states)
        if rank not in silent
    ]
    finding = analyse(flights, range(len(states)), sorted(silent & set(range(len(states)))))
    waiting = {one.rank for one in flights if one.waits()}
    assert finding.reason
    assert (finding.kind == "none") == (not waiting)
    if finding.kind == "missing":
        assert not set(finding.ranks) & waiting
    if finding.kind == "stuck_together":
        assert set(finding.ranks) <= waiting


def test_many_ways_to_be_wrong_are_counted_not_listed() -> None:
    flights = [flight(rank, call("0", 1, size=rank + 1, retired=False)) for rank in range(2000)]
    found = analyse(flights, range(2000))
    assert found.kind == "desync_shape"
    assert "and 1,996 more variants" in found.reason
    assert len(found.reason) < 1000


def test_a_record_is_shortened_to_its_newest_entries_and_stays_one() -> None:
    whole = json.dumps({"version": "2.10", "entries": history("0", 2000, inside=True)}).encode()
    short = newest(whole, 100_000)
    told = json.loads(short)
    assert len(short) <= 100_000
    assert told["version"] == "2.10"
    assert told["entries"][-1] == json.loads(whole)["entries"][-1]
    assert len(told["entries"]) > 50
    assert newest(short, 100_000) == short
    assert isinstance(json.loads(newest(b"no record" * 10_000, 1000)), str)


RANKS = range(4)


def call_of_group(at: int, number: int, library: str, size: int, *, over: bool, local: int = 1) -> dict[str, Any]:
    return {
        "record_id": at, "pg_id": local, "process_group": ["abc", "eval"], "collective_seq_id": number,
        "p2p_seq_id": 0, "is_p2p": False, "profiling_name": f"{library}:all_reduce", "input_sizes": [[size]],
        "input_dtypes": ["Float"], "state": "completed" if over else "started", "retired": over,
    }  # fmt: skip


def record(library: str, lives: tuple[int, ...], inside: bool, first: int = 0, *, renumbered: bool = True) -> Any:
    """So many collectives of each life, all over; then one more of the last when `inside`; without the oldest."""
    entries: list[dict[str, Any]] = []
    for life, count in enumerate(lives):
        local = 1 + life * renumbered
        entries += [call_of_group(len(entries) + at, at + 1, library, 4, over=True, local=local) for at in range(count)]
    if inside:
        entries.append(
            call_of_group(len(entries), lives[-1] + 1, library, 7, over=False, local=1 + (len(lives) - 1) * renumbered)
        )
    told: dict[str, Any] = {"entries": entries[first:], "pg_config": {"1": {"name": "abc", "ranks": str([*RANKS])}}}
    if library == "nccl":
        status = {
            str(1 + life): {"last_enqueued_collective": count + (inside and life == len(lives) - 1),
                            "last_completed_collective": count}
            for life, count in enumerate(lives)
        }  # fmt: skip
        told |= {"nccl_version": "2.27", "pg_status": status if renumbered else {"1": status[str(len(lives))]}}
    return told


def found(records: list[Any]) -> Finding:
    return analyse([FlightRecord.from_json(parse(rank, one).to_json()) for rank, one in enumerate(records)], RANKS)


@pytest.mark.parametrize("library", ["nccl", "gloo"])
@pytest.mark.parametrize(
    ("lives", "renumbered"),
    [((50, 3), True), ((3, 50), True), ((1, 1), True), ((5, 5), True), ((9, 4, 2), True), ((50, 3), False)],
)
def test_only_the_newest_life_of_a_group_counts(library: str, lives: tuple[int, ...], renumbered: bool) -> None:
    finding = found([record(library, lives, rank != 3, renumbered=renumbered) for rank in RANKS])
    assert (finding.kind, finding.ranks, finding.sequence) == ("missing", (3,), lives[-1] + 1)


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_who_has_only_the_life_before_has_entered_nothing_of_this_one(library: str) -> None:
    records = [record(library, (10, 3) if rank != 3 else (10,), rank != 3) for rank in RANKS]
    finding = found([*records[:3], record(library, (10,), False)])
    assert (finding.kind, finding.ranks) == ("missing", (3,))


@pytest.mark.parametrize("library", ["nccl", "gloo"])
@pytest.mark.parametrize(
    "last",
    [(10, 3), (10,), (2,)],
    ids=["in the same life", "in the life before", "in the life before, with fewer collectives"],
)
def test_where_records_have_lost_lives_nobody_is_named(library: str, last: tuple[int, ...]) -> None:
    whole, cut = record(library, (10, 3), True), record(library, (10, 3), True, first=10)
    finding = found([whole, cut, cut, record(library, last, False)])
    assert (finding.kind, finding.culprits) == ("stuck_together", ())
    assert finding.reason.endswith(
        "the group was created again under the same name, and the records do not show which rank is missing"
    )


def test_who_is_stuck_in_the_life_before_is_not_named_for_the_next() -> None:
    records = [record("nccl", (10, 3), True) for _ in range(3)]
    finding = found([*records, record("nccl", (9,), True)])
    assert finding.culprits == ()


def test_who_waits_where_nobody_knows_for_whom_is_not_named_elsewhere() -> None:
    whole, cut = record("gloo", (10, 3), True), record("gloo", (10, 3), True, first=10)
    other = {**call_of_group(20, 1, "gloo", 4, over=False, local=9), "process_group": ["pair", ""]}
    pair = {"9": {"name": "pair", "ranks": "[0, 3]"}}
    last = record("gloo", (10, 3), False)
    last["entries"].append(other)
    for one in (whole, last):
        one["pg_config"] |= pair
    assert found([whole, cut, cut, last]).culprits == ()


def test_torchs_own_record_of_a_group_made_twice(programs: WarmPrograms, tmp_path: Path) -> None:
    (ended,) = programs.run("tests.trainer.agent.flight.own_records", [["twice", tmp_path / "record"]])
    assert ended.code == 0, ended.err
    record = (tmp_path / "record").read_bytes()
    names = {entry["process_group"][0] for entry in json.loads(record)["entries"]}
    assert len(names) == 1
    flight = parse(0, record)
    group = flight.groups[names.pop()]
    assert (group.entered, group.completed, group.before, group.surely) == (2, 2, 1, True)
    assert [entry.sequence for entry in flight.entries] == [1, 2]
