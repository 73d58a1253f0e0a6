"""The arena from both sides: bytes, records, changing shapes, and a publisher that dies within a record."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing.format.manifest import FileEntry
from checkpointing.message_codec import encode
from checkpointing.storage.digests import CHUNK
from checkpointing.storage.shared_memory import PAGE
from checkpointing.writer import arena
from checkpointing.writer.arena import Arena, BufferRecord

MIB = 1 << 20


@pytest.fixture
def sides() -> Iterator[tuple[Arena, Arena]]:
    """The rank's arena, and the writer's."""
    ours = Arena.create()
    theirs = Arena(os.dup(ours.descriptor))
    yield ours, theirs
    ours.close()
    theirs.close()


def record(step: int = 7, **changes: object) -> BufferRecord:
    entry = FileEntry(name="__0_0.distcp", size=8192, chunks=("ab" * 16,))
    fields = {"step": step, "plan": "p1", "name": "n", "extra": {"at": 3}, "files": (entry,), "places": (0,)}
    return BufferRecord(**{**fields, **changes})


def test_both_sides_see_the_same_bytes_and_records(sides):
    ours, theirs = sides
    assert (theirs.plan, theirs.buffers) == ("", 0)
    ours.shape(MIB - 100, 2, "p1")
    theirs.reload()
    assert (theirs.plan, theirs.buffers, theirs.buffer_bytes, theirs.stamp) == ("p1", 2, MIB, ours.stamp)
    for index in range(2):
        ours.buffer(index)[:3] = b"abc"
        ours.buffer(index)[-3:] = b"xyz"
        assert bytes(theirs.buffer(index)) == b"abc" + bytes(MIB - 6) + b"xyz"
    theirs.publish(1, record())
    assert (ours.record(0), ours.record(1)) == (None, record())
    ours.clear(1)
    assert theirs.record(1) is None


def test_an_arena_costs_one_descriptor_and_its_views_outlive_it():
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena.create("orch-only-arena")
    arena.shape(MIB, 2, "p1")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    view = arena.buffer(1)
    arena.close()
    view[:] = bytes(MIB)
    assert len(os.listdir("/proc/self/fd")) == before
    del view
    assert "orch-only-arena" not in Path("/proc/self/maps").read_text()


def test_buffers_begin_at_pages():
    import torch

    arena = Arena.create()
    arena.shape(5000, 3, "p1")
    for index in range(3):
        view = torch.frombuffer(arena.buffer(index), dtype=torch.uint8)
        assert (view.data_ptr() % PAGE, len(view)) == (0, 8192)
        del view
    arena.close()


def test_a_record_with_any_damaged_byte_is_ignored(sides):
    ours, theirs = sides
    ours.shape(MIB, 1, "p1")
    theirs.reload()
    ours.publish(0, record())
    length = len(encode(record())) + 32
    for at in random.Random(5).sample(range(length), 60):
        os.pwrite(ours.descriptor, bytes([os.pread(ours.descriptor, 1, PAGE + at)[0] ^ 1]), PAGE + at)
        assert theirs.record(0) is None, at
        os.pwrite(ours.descriptor, bytes([os.pread(ours.descriptor, 1, PAGE + at)[0] ^ 1]), PAGE + at)
    assert theirs.record(0) == record()


def test_a_damaged_shape_is_ignored(sides):
    ours, _ = sides
    ours.shape(MIB, 1, "p1")
    os.pwrite(ours.descriptor, b"#", 40)
    other = Arena(os.dup(ours.descriptor))
    assert (other.plan, other.buffers) == ("", 0)
    other.close()


def test_a_record_of_another_plan_is_ignored(sides):
    ours, theirs = sides
    ours.shape(MIB, 1, "p1")
    theirs.reload()
    ours.publish(0, record())
    ours.shape(MIB, 1, "p2")
    assert ours.record(0) is None
    theirs.reload()
    assert theirs.record(0) is None


def test_a_new_shape_is_empty_and_does_not_disturb_readers_of_the_old_one(sides):
    ours, theirs = sides
    ours.shape(4 * MIB, 2, "p1")
    theirs.reload()
    old = theirs.buffer(1)
    ours.buffer(1)[:] = b"x" * (4 * MIB)
    for size in (MIB, 16 * MIB):  # smaller, then bigger
        ours.shape(size, 2, f"p{size}")
        assert bytes(ours.buffer(1)) == bytes(size)
        assert len(bytes(old)) == 4 * MIB  # a shrunk file would have killed this process
        theirs.reload()
        assert (theirs.plan, theirs.buffer_bytes) == (f"p{size}", size)


def test_records_of_the_largest_kind_fit_and_larger_ones_are_refused(sides):
    ours, _ = sides
    size, room = 4 * CHUNK, 5000
    ours.shape(size, 1, "p1", extra_room=room)
    sizes = [size - 63 * PAGE] + [PAGE] * 63
    files = tuple(
        FileEntry(name=f"{'n' * 250}-{at:02d}", size=part, chunks=("ab" * 16,) * -(-part // CHUNK))
        for at, part in enumerate(sizes)
    )
    large = record(files=files, places=tuple(range(64)), extra={"x": "y" * (room - 10)})
    ours.publish(0, large)
    assert ours.record(0) == large
    with pytest.raises(ValueError, match="do not fit"):
        ours.publish(0, record(extra={"x": "y" * 100_000}))
    assert ours.record(0) is None


_PUBLISHER = """
import itertools, sys
from checkpointing.writer import arena
from checkpointing.writer.arena import Arena, BufferRecord
arena = Arena(int(sys.argv[1]))
for step in itertools.count(1):
    arena.publish(0, BufferRecord(step=step, plan="p1", name=f"s{step}" * 2000, files=(), places=()))
    if step == 3:
        print("on", flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_publisher_that_is_killed_leaves_a_whole_record_or_none(sides, seed):
    ours, _ = sides
    ours.shape(MIB, 1, "p1", extra_room=100_000)
    child = subprocess.Popen(
        [sys.executable, "-c", _PUBLISHER, str(ours.descriptor)], pass_fds=[ours.descriptor], stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        # Where it is killed is the seed's business: so many looks later.
        for _ in range(random.Random(seed).randrange(2000)):
            ours.record(0)
        child.send_signal(signal.SIGKILL)
    found = ours.record(0)
    assert found is None or found.name == f"s{found.step}" * 2000


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_record_may_fill_its_place_and_not_more(size: int) -> None:
    payload, room = b"x" * size, memoryview(bytearray(arena._SEAL.size + size))
    arena._seal(room, arena._RECORD_MARK, payload)
    assert arena._unseal(room, arena._RECORD_MARK) == payload
    assert arena._unseal(room, b"other-mk") is None
    if size:
        assert arena._unseal(room[:-1], arena._RECORD_MARK) is None
    with pytest.raises(ValueError, match=rf"^{size + 1} bytes do not fit into {size}$"):
        arena._seal(room, arena._RECORD_MARK, payload + b"y")
