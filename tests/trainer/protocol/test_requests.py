"""The inbox of a live job: what is no request of the job's own user is not obeyed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trainer.protocol.requests import LARGEST, MOST_BYTES, Request, RequestKind, pending

GOOD: dict[str, Any] = {"kind": "deadline", "attempt": 1, "reason": "Slurm says so", "value": 1.8e9, "detail": ""}


def names(folder: Path) -> list[str]:
    return [request.name for request in pending(folder, 1, set())]


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    name = Request(kind=RequestKind.DEADLINE, attempt=1, reason="sooner", value=1.5).write(tmp_path)
    (read,) = pending(tmp_path, 1, set())
    assert (read.name, read.kind, read.reason, read.value) == (name, RequestKind.DEADLINE, "sooner", 1.5)


@pytest.mark.parametrize("value", ["0", "1.8e9", "1099511627776"])
def test_values_that_can_be_a_time_or_a_rank_are_taken(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GOOD).replace("1800000000.0", value))
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "1e300", "-1", "-1e-9", "9" * 400, "9" * 5000, "true", '"nan"']
)
def test_a_value_that_is_no_such_number_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GOOD).replace("1800000000.0", value))
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": True}, {"attempt": 1.0}, {"attempt": "1"}, {"kind": "exec"}, {"kind": ["stop"]}, {"reason": 7},
        {"detail": None}, {"more": 1}, {"value": LARGEST * 2}, {"reason": "x" * MOST_BYTES},
    ],
)  # fmt: skip
def test_fields_of_another_kind_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GOOD | change))
    assert names(tmp_path) == []


def test_what_is_no_file_of_its_own_is_refused_at_once(tmp_path: Path) -> None:
    inbox, outside = tmp_path / "requests", tmp_path / "outside"
    inbox.mkdir()
    outside.write_text(json.dumps(GOOD))
    os.mkfifo(inbox / "fifo.json")
    (inbox / "folder.json").mkdir()
    (inbox / "link.json").symlink_to(outside)
    (inbox / "hard.json").hardlink_to(outside)
    (inbox / "gone.json").symlink_to(tmp_path / "gone")
    assert names(inbox) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    os.chown(tmp_path / "a.json", 61002, -1)
    assert names(tmp_path) == []
