"""Groups that are made again under their old names: their numbers begin at 1 again, and are not compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.warm_programs import WarmPrograms
from trainer.agent.flight.analysis import analyse
from trainer.agent.flight.flight_record import FlightRecord, parse
from trainer.agent.flight.wait_graph import Finding

RANKS = range(4)


def call(at: int, number: int, library: str, size: int, *, over: bool, local: int = 1) -> dict[str, Any]:
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
        entries += [call(len(entries) + at, at + 1, library, 4, over=True, local=local) for at in range(count)]
    if inside:
        entries.append(
            call(len(entries), lives[-1] + 1, library, 7, over=False, local=1 + (len(lives) - 1) * renumbered)
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
    """Rank 0 shows that the group was made again; the others' records may have lost whole lives of it."""
    whole, cut = record(library, (10, 3), True), record(library, (10, 3), True, first=10)
    finding = found([whole, cut, cut, record(library, last, False)])
    assert (finding.kind, finding.culprits) == ("stuck_together", ())
    assert finding.reason.endswith(
        "the group was made again under its name, and the records do not show which rank is missing"
    )


def test_who_is_stuck_in_the_life_before_is_not_named_for_the_next() -> None:
    records = [record("nccl", (10, 3), True) for _ in range(3)]
    finding = found([*records, record("nccl", (9,), True)])
    assert finding.culprits == ()


def test_who_waits_where_nobody_knows_for_whom_is_not_named_elsewhere() -> None:
    """Rank 3 waits in another group for rank 0, which waits in the one that was made again."""
    whole, cut = record("gloo", (10, 3), True), record("gloo", (10, 3), True, first=10)
    other = {**call(20, 1, "gloo", 4, over=False, local=9), "process_group": ["pair", ""]}
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
