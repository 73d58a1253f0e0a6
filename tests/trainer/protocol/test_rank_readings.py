"""ranks.json: what is written is read, what is odd is left out, and what is something else is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.protocol.rank_readings import RankReading, RankReadings

PRESENT = (
    '{"schema":"orch.ranks/1","time":1700000000.5,"generation":2,"world":3,"ranks":[{"rank":0,"node":"n1","step":7,'
    '"phase":"forward","age":0.1,"state":"R","ratio":1.31,"ended":false},{"rank":1,"node":"n2","step":null,'
    '"phase":"command","age":null,"state":"T","ratio":null,"ended":true}],"p99":{"data":0.25}}\n'
)
"""A file as the releases before this class wrote it."""
SEEN = RankReadings(
    generation=2, world=3, time=1700000000.5, p99={"data": 0.25},
    ranks=(
        RankReading(rank=0, node="n1", step=7, phase="forward", age=0.1, state="R", ratio=1.31),
        RankReading(rank=1, node="n2", phase="command", state="T", ended=True),
    ),
)  # fmt: skip


def read(folder: Path, text: str) -> RankReadings:
    (folder / "ranks.json").write_text(text)
    return RankReadings.read(folder / "ranks.json")


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(PRESENT), **fields})


def test_a_file_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, PRESENT) == SEEN


def test_what_is_written_is_what_earlier_releases_wrote(tmp_path: Path) -> None:
    SEEN.write(tmp_path / "ranks.json")
    assert json.loads((tmp_path / "ranks.json").read_text()) == json.loads(PRESENT)
    assert RankReadings.read(tmp_path / "ranks.json") == SEEN


def test_odd_fields_count_as_left_out(tmp_path: Path) -> None:
    odd = {"rank": 4, "node": 5, "step": True, "phase": None, "age": "nan", "state": [], "ratio": {}, "ended": 1}
    rows = [odd, {"node": "n1", "step": 7}, {"rank": True}, "rank 3", {"rank": 9}]
    found = read(tmp_path, changed(world="three", time=None, p99={"data": "soon", "forward": 2}, ranks=rows))
    assert found == RankReadings(
        generation=2, world=2, ranks=(RankReading(rank=4), RankReading(rank=9)), p99={"forward": 2.0}
    )


def test_numbers_that_nothing_can_hold_count_as_left_out(tmp_path: Path) -> None:
    huge = 10**400
    rows = [{"rank": 1, "step": huge, "age": huge, "ratio": huge}, {"rank": huge}]
    found = read(tmp_path, changed(time=huge, p99={"data": huge}, ranks=rows))
    assert (found.ranks, found.time, found.p99) == ((RankReading(rank=1),), 0.0, {})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, changed(schema="orch.ranks/2"), changed(generation="2"), changed(ranks={})]
)
def test_anything_else_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"ranks\.json"):
        read(tmp_path, text)
