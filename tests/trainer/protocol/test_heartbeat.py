"""heartbeat.json as others may have left it."""

import json
from pathlib import Path

import pytest

from trainer.protocol.heartbeat import Heartbeat


def read(folder: Path, **fields: object) -> Heartbeat:
    (folder / "heartbeat.json").write_text(json.dumps({"schema": "orch.heartbeat/1", "seq": 4, **fields}))
    return Heartbeat.read(folder / "heartbeat.json")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    beat = Heartbeat(seq=3, time=5.5, attempt=1, job_id="7", step=9, loss=float("nan"), nodes=["n1"], phase="data")
    beat.write(tmp_path / "heartbeat.json")
    found = Heartbeat.read(tmp_path / "heartbeat.json")
    assert str(found.loss) == "nan"
    assert found == Heartbeat(**{**vars(beat), "loss": found.loss})


@pytest.mark.parametrize("odd", [10**400, float("inf"), "soon", None, [], True])
def test_numbers_that_nothing_can_hold_count_as_left_out(tmp_path: Path, odd: object) -> None:
    found = read(tmp_path, time=odd, step=odd, total_steps=odd, loss=None if odd == "soon" else odd)
    assert found == Heartbeat(seq=4)


@pytest.mark.parametrize("odd", [10**400, float("inf"), "4", None])
def test_one_that_does_not_count_is_refused(tmp_path: Path, odd: object) -> None:
    with pytest.raises(ValueError, match="heartbeat.json: seq="):
        read(tmp_path, seq=odd)
