"""A disk that is full, read-only, broken or hung: training continues, failures are reported, the next save succeeds."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.verification.verify import verify
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.proofs.mounts import frozen, loop_ext4, remount, small_tmpfs
from tests.checkpointing.proofs.world import World, marked, same, state

PATIENCE_S, LONGEST_CALL_S = 15.0, 0.5
TROUBLE = ("checkpoint.retried", "checkpoint.failed", "checkpoint.skipped")


class Training:
    """A training loop: a step, now and then a save, and the duration of every call."""

    def __init__(self, world: World, made: Checkpointer) -> None:
        self.world, self.made, self.step, self.longest = world, made, 0, 0.0
        self._weight = torch.eye(32)

    def steps(self, number: int = 20) -> None:
        for _ in range(number):
            self.step += 1
            self._weight = torch.tanh(self._weight @ self._weight)
            self._timed(self.made.before_optimizer_step)

    def save(self) -> int:
        self.steps()
        self._timed(lambda: self.made.save(self.step, state(self.step), {"position": self.step}))
        return self.step

    def until(self, done: Callable[[], bool]) -> None:
        """Train until `done`; fails when it takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, self.world.events
            self.steps(1)
            time.sleep(0.001)

    def committed(self, step: int) -> bool:
        return step in [data["step"] for data in self.world.reported("checkpoint.committed")]

    def trouble(self) -> list[dict[str, Any]]:
        return [data for kind, data in self.world.events if kind in TROUBLE]

    def saved_at_last(self) -> int:
        """Save again and again, as a run does, until a save that began now is committed; its step."""
        begun: list[int] = []

        def landed() -> bool:
            if not begun or any(data["step"] == begun[-1] for data in self.trouble()):
                begun.append(self.save())
            return self.committed(begun[-1])

        self.until(landed)
        return begun[-1]

    def _timed(self, act: Callable[[], Any]) -> None:
        start = time.monotonic()
        act()
        self.longest = max(self.longest, time.monotonic() - start)


@pytest.fixture
def train() -> Iterator[Callable[..., Training]]:
    opened: list[Any] = []

    def begin(root: Path, **options: Any) -> Training:
        world = World(root / "checkpoints")
        context = world.checkpointer(**options)
        made = context.__enter__()
        opened.append(context)
        made.prepare(state(0))
        return Training(world, made)

    yield begin
    for context in opened:
        context.__exit__(None, None, None)


def assert_good(training: Training, step: int) -> None:
    """The last save is complete on the disk, and training never stalled."""
    training.made.wait()
    target = marked(state(step))
    restored = training.made.restore(target)
    assert restored is not None
    assert (restored.step, same(target, state(step))) == (step, True)
    assert verify(training.world.root / restored.name, 2).ok
    assert training.longest < LONGEST_CALL_S, "a call waited for the disk"


def test_a_full_disk(tmp_path: Path, train: Callable[..., Training]) -> None:
    with small_tmpfs(tmp_path / "small", "2m") as disk:
        training = train(disk)
        training.saved_at_last()
        ballast = disk / "ballast"
        with pytest.raises(OSError, match="No space left"):
            fill(ballast)
        training.save()
        training.until(lambda: bool(training.trouble()))
        assert "disk full" in training.trouble()[0]["reason"]
        assert len(training.world.reported("checkpoint.committed")) == 1
        ballast.unlink()
        assert_good(training, training.saved_at_last())
        close(training)


def test_a_disk_that_turns_read_only(tmp_path: Path, train: Callable[..., Training]) -> None:
    with small_tmpfs(tmp_path / "small", "16m") as disk:
        training = train(disk)
        training.saved_at_last()
        remount(disk, "ro")
        training.save()
        training.until(lambda: bool(training.trouble()))
        assert "Read-only file system" in training.trouble()[0]["reason"]
        remount(disk, "rw")
        assert_good(training, training.saved_at_last())
        close(training)


def test_a_disk_that_hangs(tmp_path: Path, train: Callable[..., Training]) -> None:
    with loop_ext4(tmp_path / "disk", 64) as disk:
        training = train(disk)
        training.saved_at_last()
        with frozen(disk):
            hung = [training.save() for _ in range(5)]
            training.until(lambda: bool(training.world.reported("checkpoint.skipped")))
            assert not any(training.committed(step) for step in hung)
            assert training.longest < LONGEST_CALL_S, "a call waited for the disk"
        assert_good(training, training.saved_at_last())
        close(training)


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


def close(training: Training) -> None:
    """Before the disk goes away below it."""
    training.made.close()


# ---- an error at the n-th operation of a save, on a storage that counts them


def operations_of_a_save(place: Path) -> int:
    """How often one successful save, with the deletions that follow it, calls its storage."""
    calls: list[str] = []
    world = World(place)
    storage = Faulty(place, broken=lambda operation, _: int(calls.append(operation) is not None))
    with world.checkpointer(storage=storage) as made:
        made.prepare(state(0))
        for step in (1, 2, 3):
            calls.clear()
            made.save(step, state(step), {})
            made.wait()
    return len(calls)


def assert_survives(place: Path, number: int, error: int) -> None:
    """A save whose n-th operation fails is reported or retried; the next one succeeds; nothing is lost."""
    left, armed = [number], threading.Event()

    def broken(_operation: str, _written: int) -> int:
        if armed.is_set():
            left[0] -= 1
        return error if armed.is_set() and left[0] == 0 else 0

    world = World(place)
    with world.checkpointer(storage=Faulty(place, broken=broken)) as made:
        made.prepare(state(0))
        for step in (1, 2):
            made.save(step, state(step), {})
        made.wait()
        armed.set()
        made.save(3, state(3), {})
        made.wait()
        armed.clear()
        reported = {
            kind: [data["step"] for data in world.reported(kind)] for kind in ("checkpoint.committed", *TROUBLE)
        }
        assert 3 in reported["checkpoint.committed"] or 3 in reported["checkpoint.failed"], (number, world.events)
        made.save(4, state(4), {})
        made.wait()
        target = marked(state(4))
        restored = made.restore(target)
    assert restored is not None
    assert (restored.step, same(target, state(4))) == (4, True), (number, world.events)
    found = {path.name for path in place.iterdir()}
    assert all(verify(place / name, 2).ok for name in found if name.startswith("step-")), (number, found)
    assert len(found) <= 2, f"{number}: debris in {found}"


def test_an_error_at_some_operations(tmp_path: Path) -> None:
    total = operations_of_a_save(tmp_path / "count")
    for number in range(1, total + 1, max(1, total // 6)):
        assert_survives(tmp_path / str(number), number, errno.EIO)


@pytest.mark.proof
def test_an_error_at_every_operation(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    total = operations_of_a_save(tmp_path / "count")
    for number in range(1, total + 1):
        for error in (errno.EIO, errno.ENOSPC, errno.EROFS):
            assert_survives(tmp_path / f"{number}-{error}", number, error)
    record_property("operations that failed once each with EIO, ENOSPC, EROFS", total)
