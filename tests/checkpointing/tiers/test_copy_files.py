"""Copies of a checkpoint's files: verified, no faster than allowed, retried after a transient error."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import FileEntry
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import CHUNK, digest
from checkpointing.tiers.copy_files import (
    CopyChoice,
    CopyOrder,
    Retry,
    Throttle,
    TierContents,
    choose_checkpoint,
    copy_file,
    copy_files,
    divide_files,
)
from tests.checkpointing.fake_storages import Faulty, failing_at, full_after, read_only
from tests.checkpointing.made_checkpoint import NONCE

DATA = bytes(range(256)) * 41  # 10,496 bytes: ten chunks of 1 KiB and a bit
PATH = "step-00000005.001-ab12cd34/__0_0.distcp"
FOLDER, _, FILE = PATH.partition("/")


def described(data: bytes, chunk: int = 1024) -> FileEntry:
    return FileEntry.from_bytes(FILE, data, chunk)


@dataclass
class Clock:
    """A clock that advances only during sleeps."""

    now: float = 100.0
    naps: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


@pytest.fixture
def source(tmp_path: Path) -> Faulty:
    storage = Faulty(tmp_path / "source")
    put(storage, DATA)
    return storage


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Faulty]:
    return Faulty(tmp_path / "target")


def put(storage: LocalStorage, data: bytes) -> None:
    path = storage.root / PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def quick(clock: Clock, attempts: int = 5) -> Retry:
    return Retry(attempts=attempts, sleep=clock.sleep, draw=lambda: 1.0)


def test_a_copy_is_the_same_bytes(source: Faulty, target: Faulty) -> None:
    assert copy_file(source, target, FOLDER, described(DATA)) == len(DATA)
    assert (target.root / PATH).read_bytes() == DATA


def test_an_empty_file_is_copied_too(source: Faulty, target: Faulty) -> None:
    put(source, b"")
    assert copy_file(source, target, FOLDER, described(b"")) == 0
    assert (target.root / PATH).read_bytes() == b""


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], "chunk 4: digest differs"),
        (lambda data: data[:-1], "chunk 10: the file is too short"),
        (lambda data: data[:3000], "chunk 2: the file is too short"),
        (lambda data: data + b"x", "the file is longer than 10496 bytes"),
    ],
)
def test_a_bad_source_is_never_copied(source: Faulty, target: Faulty, damage, reported: str) -> None:
    put(source, damage(DATA))
    clock = Clock()
    with pytest.raises(CheckpointRefused, match=reported):
        copy_file(source, target, FOLDER, described(DATA), retry=quick(clock))
    assert target.list(FOLDER) == {}
    assert clock.naps == [], "bytes that are wrong do not get right by waiting"


def test_a_transient_error_is_tried_again_with_backoff(source: Faulty, target: Faulty) -> None:
    clock = Clock()
    target.broken = failing_at(3)
    assert copy_file(source, target, FOLDER, described(DATA), retry=quick(clock)) == len(DATA)
    assert (target.root / PATH).read_bytes() == DATA
    assert clock.naps == [0.5]


def test_a_lasting_transient_error_ends_after_all_tries(source: Faulty, target: Faulty) -> None:
    clock = Clock()
    source.broken = lambda operation, _: errno.EIO if operation.startswith("open") else 0
    with pytest.raises(OSError, match=f"reading {FOLDER}"):
        copy_file(source, target, FOLDER, described(DATA), retry=quick(clock, attempts=4))
    assert clock.naps == [0.5, 1.0, 2.0]


@given(st.integers(0, 12), st.floats(0, 1))
def test_waits_grow_and_stay_bounded(attempt: int, draw: float) -> None:
    clock = Clock()

    def fail() -> None:
        raise OSError(errno.EIO, "no")

    with pytest.raises(OSError, match="no"):
        Retry(attempts=attempt + 1, sleep=clock.sleep, draw=lambda: draw, most=30.0).run(fail)
    assert len(clock.naps) == attempt
    assert all(0 <= nap <= 30.0 for nap in clock.naps)
    assert all(left <= right for left, right in pairwise(clock.naps))


@pytest.mark.parametrize(("broken", "number"), [(full_after(3000), errno.ENOSPC), (read_only, errno.EROFS)])
def test_a_full_or_read_only_disk_is_reported_immediately(source: Faulty, target: Faulty, broken, number: int) -> None:
    clock = Clock()
    target.broken = broken
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        copy_file(source, target, FOLDER, described(DATA), retry=quick(clock))
    assert (caught.value.errno, clock.naps) == (number, [])
    target.broken = lambda operation, written: 0
    assert target.list(FOLDER) == {}, "what was half copied is gone"


def test_a_finished_file_is_not_copied_again(source: Faulty, target: Faulty) -> None:
    copy_file(source, target, FOLDER, described(DATA))
    before = target.written
    assert copy_file(source, target, FOLDER, described(DATA)) == 0
    assert target.written == before


@pytest.mark.parametrize(
    "left", [b"", DATA[:4096], b"y" * len(DATA), DATA + b"z"], ids=["empty", "half", "other", "long"]
)
def test_a_half_copied_or_foreign_file_is_replaced(source: Faulty, target: Faulty, left: bytes) -> None:
    put(target, left)
    assert copy_file(source, target, FOLDER, described(DATA)) == len(DATA)
    assert (target.root / PATH).read_bytes() == DATA


def test_a_file_whose_fsync_failed_is_written_again_although_it_looks_right(source: Faulty, target: Faulty) -> None:
    target.broken = failing_at(1, operation="fsync")
    target.delete = lambda path: LocalStorage.delete(target, path) if target.healed.is_set() else None
    clock = Clock()
    retry = Retry(sleep=lambda seconds: (clock.sleep(seconds), target.healed.set()), draw=lambda: 1.0)
    put_after_abort = target.root / PATH
    assert copy_file(source, target, FOLDER, described(DATA), retry=retry) == len(DATA)
    assert put_after_abort.read_bytes() == DATA
    assert target.written == 2 * len(DATA)


def test_a_copy_that_is_no_longer_wanted_ends_before_the_next_chunk(source: Faulty, target: Faulty) -> None:
    asked = iter([False] * 4 + [True] * 9)
    clock = Clock()
    with pytest.raises(OSError, match="was cancelled") as caught:
        copy_file(source, target, FOLDER, described(DATA), retry=quick(clock), stopped=lambda: next(asked))
    assert (caught.value.errno, clock.naps) == (errno.ECANCELED, [])
    assert target.written == 4 * 1024


def test_an_abandoned_copy_leaves_its_successors_file_alone(source: Faulty, target: Faulty) -> None:
    """The disk hung, the writer's rank is gone, and the next one's writer has taken over before it answers again."""
    left = [False] * 4

    def stopped() -> bool:
        if not left:
            target.delete(PATH)
            copy_file(source, target, FOLDER, described(DATA))
            return True
        return left.pop()

    asked: list[bool] = []
    with pytest.raises(OSError, match="was cancelled"):
        copy_file(
            source,
            target,
            FOLDER,
            described(DATA),
            stopped=lambda: any(asked) or (asked.append(stopped()), asked[-1])[1],
        )
    assert (target.root / PATH).read_bytes() == DATA


def test_a_copy_respects_its_bandwidth_limit(source: Faulty, target: Faulty) -> None:
    clock = Clock()
    throttle = Throttle(1000.0, burst=1024, clock=clock, sleep=clock.sleep)
    copy_file(source, target, FOLDER, described(DATA), throttle=throttle)
    paid = len(DATA) - 1024 - 256  # all but the first burst; the next caller pays for the last piece
    assert clock.now - 100.0 == pytest.approx(paid / 1000.0, abs=1.1)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 4096), st.floats(1.0, 1e6))
def test_no_stretch_of_time_gets_more_than_the_rate_and_one_burst(sizes: list[int], burst: int, rate: float) -> None:
    clock = Clock()
    throttle = Throttle(rate, burst=burst, clock=clock, sleep=clock.sleep)
    passed = []
    for size in sizes:
        throttle.take(size)
        passed.append((clock.now, size))
    for first in range(len(passed)):
        sent = sum(size for _, size in passed[first:])
        stretch = passed[-1][0] - passed[first][0]
        # The last piece is still being paid for, and so is what was taken on credit before it.
        assert sent <= stretch * rate * (1 + 1e-9) + burst + 2 * max(sizes) + 1


def order(source: Faulty, target: Faulty, *files: FileEntry, bandwidth: float = 0.0) -> CopyOrder:
    return CopyOrder(source=str(source.root), target=str(target.root), folder=FOLDER, files=files, bandwidth=bandwidth)


def test_an_order_copies_all_its_files_and_says_how_much(source: Faulty, target: Faulty) -> None:
    other = replace(described(DATA), name="other")
    (source.root / FOLDER / "other").write_bytes(DATA)
    copied = copy_files(order(source, target, described(DATA), other))
    assert (copied.bytes, copied.bad) == (2 * len(DATA), "")
    assert target.list(FOLDER) == {FILE: len(DATA), "other": len(DATA)}
    assert copy_files(order(source, target, described(DATA), other)).bytes == 0


def test_an_order_says_what_is_wrong_at_its_source(source: Faulty, target: Faulty) -> None:
    put(source, DATA[:-5] + b"fault")
    copied = copy_files(order(source, target, described(DATA)))
    assert (copied.bytes, copied.bad) == (0, "__0_0.distcp chunk 10: digest differs")


def test_an_orders_files_share_its_bandwidth(source: Faulty, target: Faulty) -> None:
    big = bytes(9 << 20)
    for name in ("a", "b", "c"):
        (source.root / FOLDER / name).write_bytes(big)
    files = [replace(described(big, 1 << 20), name=name) for name in ("a", "b", "c")]
    clock = Clock()
    copied = copy_files(order(source, target, *files, bandwidth=2.0), sleep=clock.sleep, clock=clock)
    assert copied.seconds == pytest.approx((27 - 8 - 1) / 2.0, abs=0.51), "all but the first burst of 8 MiB"


def test_no_limit_never_sleeps() -> None:
    clock = Clock()
    throttle = Throttle(0.0, clock=clock, sleep=clock.sleep)
    throttle.take(1 << 40)
    throttle.take(1 << 40)
    assert clock.naps == []


def name(step: int, attempt: int = 1) -> str:
    return f"step-{step:08d}.{attempt:03d}-{NONCE}"


def content(*steps: int) -> TierContents:
    return tuple(name(step) for step in steps)


@pytest.mark.parametrize(
    ("contents", "facts", "expected"),
    [
        ([content(), content()], {}, CopyChoice(None, 0, "no faster tier has a trusted checkpoint")),
        ([content(30, 20), content()], {}, CopyChoice(name(30), 0, "the tier has none yet")),
        ([content(30, 20), content(30)], {}, CopyChoice(None, 0, "the tier already has the newest one")),
        ([content(30, 20), content(20)], {}, CopyChoice(name(30), 0, "a newer one is available")),
        ([content(30), content(20)], {"every": 10}, CopyChoice(name(30), 0, "a newer one is available")),
        (
            [content(30), content(20)],
            {"every": 11},
            CopyChoice(None, 0, "it must be 11 steps newer than the tier's newest, but is only 10"),
        ),
        (
            [content(30), content(20)],
            {"every": 11, "everything": True},
            CopyChoice(name(30), 0, "the last one goes to every tier"),
        ),
        # After a roll-back from 30 to 20, 25 is the newest work.
        ([content(30, 25), content(30)], {"latest": name(25)}, CopyChoice(name(25), 0, "a newer one is available")),
        ([content(30, 26), content(30, 25)], {"latest": name(26), "last": name(25), "every": 5}, None),
        # The fastest tier that has it is read.
        ([content(20), content(30, 20), content()], {}, CopyChoice(name(30), 1, "the tier has none yet")),
        ([content(30), content(30), content()], {}, CopyChoice(name(30), 0, "the tier has none yet")),
        # What was just committed may be gone again.
        ([content(40), content()], {"latest": name(35)}, CopyChoice(name(40), 0, "the tier has none yet")),
    ],
)
def test_a_tier_receives_checkpoints_that_are_due(
    contents: list[TierContents], facts: dict[str, Any], expected: CopyChoice | None
) -> None:
    choice = choose_checkpoint(contents, len(contents) - 1, **facts)
    if expected is None:
        assert choice.name is None
    else:
        assert choice == expected


def entry(file: str, size: int) -> FileEntry:
    return FileEntry(name=file, size=size, chunks=(digest(b""),) * -(-size // CHUNK))


def test_ranks_copy_their_own_shards_and_share_the_rest() -> None:
    files = [entry("__0_0.distcp", 10), entry("__1_0.distcp", 500), entry(".metadata", 50), entry("index.json", 60)]
    first, second = divide_files(files, [None, None])
    assert {file.name for file in first} == {"__0_0.distcp", ".metadata", "index.json"}
    assert {file.name for file in second} == {"__1_0.distcp"}


def test_shards_of_former_ranks_are_shared_too() -> None:
    files = [entry(f"__{rank}_0.distcp", 100) for rank in range(6)]
    assert [len(part) for part in divide_files(files, [None, None])] == [3, 3]


def test_a_file_is_copied_by_a_rank_that_sees_it() -> None:
    files = [entry("__0_0.distcp", 10), entry("__1_0.distcp", 10)]
    seen = [frozenset({"__1_0.distcp"}), frozenset({"__0_0.distcp"})]
    assert [[file.name for file in part] for part in divide_files(files, seen)] == [["__1_0.distcp"], ["__0_0.distcp"]]
    with pytest.raises(ValueError, match="no participating node has __1_0.distcp"):
        divide_files(files, [frozenset({"__0_0.distcp"}), frozenset()])


@given(st.lists(st.integers(0, 10**9), max_size=12), st.integers(1, 5))
def test_every_file_is_copied_exactly_once(sizes: list[int], ranks: int) -> None:
    files = [entry(f"__{at}_0.distcp" if at % 2 else f"f{at}", size % CHUNK) for at, size in enumerate(sizes)]
    shares = divide_files(files, [None] * ranks)
    assert sorted(file.name for part in shares for file in part) == sorted(file.name for file in files)
