"""Rotation of logs, and reading across it."""

import os
from pathlib import Path

import pytest

from trainer.protocol.logs import log_rotation
from trainer.protocol.logs.log_rotation import LogFile, LogReader, LogsConfig, read_files, read_tail, rotated_files

SMALL = LogsConfig(max_mib=0.001, keep=3)  # 1,048 bytes


def lines(first: int, after: int) -> bytes:
    return b"".join(f"line {number:05d} {'x' * 50}\n".encode() for number in range(first, after))


def filled(path: Path, count: int, limits: LogsConfig = SMALL) -> LogFile:
    log = LogFile(path, limits)
    for number in range(count):
        log.write(lines(number, number + 1))
    return log


def test_a_log_never_takes_more_than_its_bound_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.log"
    filled(path, 1000).close()
    files = log_rotation.log_files(path)
    assert len(files) == SMALL.keep
    assert all(file.stat().st_size <= SMALL.max_bytes for file in files)
    kept = b"".join(file.read_bytes() for file in files)
    assert lines(0, 1000).endswith(kept)
    assert len(kept) > (SMALL.keep - 1) * (SMALL.max_bytes - 100)
    assert all(file.read_bytes().endswith(b"\n") for file in files)


def test_one_write_of_many_files_size_is_bounded_as_well(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", SMALL)
    log.write(lines(0, 500))
    log.write(b"y" * 5000)  # a line longer than a file
    log.close()
    files = log_rotation.log_files(tmp_path / "log")
    assert len(files) == SMALL.keep
    assert all(file.stat().st_size <= SMALL.max_bytes for file in files)
    assert set(b"".join(file.read_bytes() for file in files)) == {ord("y")}


def test_numbers_go_on_where_an_earlier_process_stopped(tmp_path: Path) -> None:
    filled(tmp_path / "log", 40).close()
    before = max(rotated_files(tmp_path / "log"))
    filled(tmp_path / "log", 40).close()
    assert max(rotated_files(tmp_path / "log")) > before
    assert len(rotated_files(tmp_path / "log")) == SMALL.keep - 1


def test_keep_one_leaves_one_file(tmp_path: Path) -> None:
    filled(tmp_path / "log", 200, LogsConfig(max_mib=0.001, keep=1)).close()
    assert os.listdir(tmp_path) == ["log"]


def test_a_tail_is_read_over_all_files(tmp_path: Path) -> None:
    filled(tmp_path / "log", 40).close()
    everything = b"".join(file.read_bytes() for file in log_rotation.log_files(tmp_path / "log"))
    for nbytes in (0, 1, 900, 1500, 2500, 10**6):
        assert read_tail(tmp_path / "log", nbytes) == (everything[-nbytes:] if nbytes else b"")
    with pytest.raises(FileNotFoundError, match="there is no log"):
        read_tail(tmp_path / "other", 10)


def test_a_reader_misses_no_line_over_rotations(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 5)
    reader = LogReader(tmp_path / "log", 2)
    assert reader.read() == lines(3, 5)
    for number in range(5, 200):
        log.write(lines(number, number + 1))
        if number % 15 == 0:
            assert reader.read().endswith(lines(number, number + 1))
    log.write(b"end\n")
    reader.close()
    found = b""
    reader = LogReader(tmp_path / "log", None)
    while block := reader.read():
        found += block
    assert lines(0, 200).endswith(found.removesuffix(b"end\n"))
    log.close()
    reader.close()


def test_a_reader_that_comes_often_enough_sees_everything(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 1)
    reader, found = LogReader(tmp_path / "log", 0), b""
    for number in range(1, 300):
        log.write(lines(number, number + 1))
        if number % 20 == 0:  # more than one file's lines
            found += reader.read()
    assert found + reader.read() == lines(1, 300)
    log.close()
    reader.close()


def test_a_reader_that_comes_too_late_goes_on_with_what_is_kept(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 1)
    reader = LogReader(tmp_path / "log", None)
    assert reader.read() == lines(0, 1)
    for number in range(1, 500):
        log.write(lines(number, number + 1))
    found = reader.read()
    assert found.endswith(lines(499, 500))
    before, gap, after = found.partition(b"[orch: lines are missing here: they were deleted before they were read]\n")
    assert gap
    assert lines(1, 500).startswith(before)
    assert lines(0, 500).endswith(after)
    log.close()
    reader.close()


def test_a_log_that_was_deleted_goes_on_in_a_new_file_when_it_is_full(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 1)
    (tmp_path / "log").unlink()
    log.write(lines(1, 40))
    log.close()
    assert read_tail(tmp_path / "log", 10**6).endswith(lines(39, 40))


def test_a_rotation_without_a_new_file_writes_into_no_other_one(tmp_path: Path, monkeypatch) -> None:
    log, real = filled(tmp_path / "log", 1), os.open

    def full(path: Path, *how: int) -> int:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="No space left"):
        log.write(lines(1, 40))
    monkeypatch.setattr(os, "open", real)
    with open(tmp_path / "other", "w+b") as other:  # gets the lowest number that is free
        log.write(b"after\n")
        log.close()
        assert os.pread(other.fileno(), 100, 0) == b""
    assert read_tail(tmp_path / "log", 10**6).endswith(b"after\n")


@pytest.mark.parametrize("read_all", [lambda path: b"".join(read_files(path)), lambda path: read_tail(path, 10**6)])
def test_a_rotation_while_a_log_is_read_hides_nothing(tmp_path: Path, monkeypatch, read_all) -> None:
    log, listed = filled(tmp_path / "log", 20), log_rotation.rotated_files
    before = b"".join(file.read_bytes() for file in log_rotation.log_files(tmp_path / "log"))

    def rotated_just_after(path: Path) -> dict[int, Path]:
        found = listed(path)
        monkeypatch.setattr(log_rotation, "rotated_files", listed)
        log.limits = LogsConfig(max_mib=0.001, keep=10)
        log.write(lines(20, 40))
        return found

    monkeypatch.setattr(log_rotation, "rotated_files", rotated_just_after)
    found = read_all(tmp_path / "log")
    assert (before + lines(20, 40)).startswith(found)
    assert found.startswith(before)
    log.close()


def test_a_reader_misses_no_file_that_is_rotated_while_it_looks_for_the_next_one(tmp_path: Path, monkeypatch) -> None:
    log, listed = filled(tmp_path / "log", 1, LogsConfig(max_mib=0.001, keep=10)), log_rotation.rotated_files
    reader = LogReader(tmp_path / "log", None)
    log.write(lines(1, 20))  # rotated once

    def rotated_just_after(path: Path) -> dict[int, Path]:
        found = listed(path)
        if found:
            monkeypatch.setattr(log_rotation, "rotated_files", listed)
            log.write(lines(20, 60))
        return found

    monkeypatch.setattr(log_rotation, "rotated_files", rotated_just_after)
    assert reader.read() + reader.read() == lines(0, 60)
    log.close()
    reader.close()


def test_a_fifo_in_the_place_of_a_log_stops_neither_writer_nor_readers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    for use in (lambda path: LogFile(path, SMALL), lambda path: read_tail(path, 10), lambda path: [*read_files(path)]):
        with pytest.raises(OSError, match="No such device or address|a FIFO"):
            use(tmp_path / "log")


@pytest.mark.parametrize("wrong", [{"max_mib": 0.0}, {"max_mib": float("nan")}, {"keep": 0}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"logs.{next(iter(wrong))}="):
        LogsConfig(**wrong)
