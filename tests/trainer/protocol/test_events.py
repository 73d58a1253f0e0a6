"""Event files: whole lines only, and no line lost to a torn one."""

import json
import os

import pytest

from trainer.protocol.events import EventKind, EventLog, read_events


@pytest.fixture
def log(tmp_path):
    log = EventLog(tmp_path / "events" / "rank-00000.jsonl", "rank-00000", 3, clock=lambda: 17.25)
    log.generation = 2
    yield log
    log.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events" / "rank-00000.jsonl"


def test_an_event_reads_back(log, path):
    log.write(EventKind.DRILL, kind="kill-rank", rank=1, step=9)
    (event,), _ = read_events(path)
    assert (event.time, event.source, event.seq, event.attempt, event.generation) == (17.25, "rank-00000", 1, 3, 2)
    assert (event.kind, event.data) == ("drill", {"kind": "kill-rank", "rank": 1, "step": 9})


def test_reading_goes_on_where_it_stood(log, path):
    log.write(EventKind.DECISION, action="restart")
    first, offset = read_events(path)
    assert read_events(path, offset) == ([], offset)
    log.write(EventKind.DECISION, action="stop")
    second, _ = read_events(path, offset)
    assert [event.data["action"] for event in first + second] == ["restart", "stop"]


def test_a_torn_last_line_waits_for_its_end(log, path):
    log.write(EventKind.DECISION, action="restart")
    with path.open("a") as stream:
        stream.write('{"time":1')
    events, offset = read_events(path)
    assert len(events) == 1
    assert offset < path.stat().st_size


def test_a_line_torn_by_a_kill_costs_only_itself(log, path):
    with path.open("a") as stream:
        stream.write('{"time":1,"sou\n[1]\n{"other":1}\n')
    log.write(EventKind.DECISION, action="restart")
    events, _ = read_events(path)
    assert [event.data for event in events] == [{"action": "restart"}]


EVENT = {"time": 1.0, "source": "a", "seq": 1, "kind": "decision", "attempt": 1, "generation": 1}
ODD = ({"data": []}, {"time": None}, {"attempt": "1"}, {"kind": {}})


@pytest.mark.parametrize("line", [b"[" * 100_000, *(json.dumps({**EVENT, **odd}).encode() for odd in ODD)])
def test_a_line_of_another_shape_costs_only_itself(log, path, line):
    path.write_bytes(line + b"\n")
    log.write(EventKind.DECISION, action="restart")
    events, _ = read_events(path)
    assert [event.data for event in events] == [{"action": "restart"}]


def test_no_file_is_no_events(tmp_path):
    assert read_events(tmp_path / "none", 5) == ([], 5)


def test_floats_read_back_to_the_bit_and_nan_is_a_string(log, path):
    log.write(EventKind.DECISION, exact=0.1 + 0.2, bad=float("nan"), far=float("-inf"))
    (event,), _ = read_events(path)
    assert event.data == {"exact": 0.1 + 0.2, "bad": "nan", "far": "-inf"}


def test_an_event_cut_short_by_a_full_disk_is_an_error_and_costs_only_itself(log, path, monkeypatch):
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
        with pytest.raises(OSError, match="No space left on device|bytes arrived"):
            log.write(EventKind.DECISION, action="lost")
    log.write(EventKind.DECISION, action="kept")
    events, _ = read_events(path)
    assert [event.data["action"] for event in events] == ["kept"]
