"""Bytes that one rank has read and others need; and what several ranks agree on before any tensor changes."""

import random
from typing import Any

import pytest
import torch

from checkpointing.engine.restore.loader import Send, _evenly, copy, gather
from checkpointing.engine.restore.read_buffers import ReadBuffers
from checkpointing.engine.restore.source import number_chunks
from checkpointing.format.read_plan import Slice, strips
from tests.warm_programs import WarmPrograms

PROGRAM = "tests.checkpointing.engine.restore.reading_program"


@pytest.mark.parametrize("seed", range(60))
def test_any_part_of_a_packed_box_is_gathered(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    starts = tuple(draw.randrange(size) for size in shape)
    sizes = tuple(draw.randint(1, size - start) for start, size in zip(starts, shape, strict=True))
    data = bytearray(33) + bytearray(values.reshape(-1).view(torch.uint8).tolist())
    box = values
    for dimension, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        box = box.narrow(dimension, start, size)
    expected = box.contiguous().view(-1).view(torch.uint8)
    rows = strips(shape, Slice("x", 0, starts, starts, sizes), 2, 33)
    (shard,) = number_chunks([("f", len(data), len(data), None)])
    buffers = ReadBuffers.from_memory(memoryview(data), [(shard, 0)])
    low = draw.randrange(len(expected))
    high = draw.randint(low, len(expected))
    goal = torch.zeros(high - low, dtype=torch.uint8)
    gather(buffers, Send(rows, 0, low, high), goal)
    assert torch.equal(goal, expected[low:high])


def test_copies_are_shared_out_by_bytes() -> None:
    assert _evenly([], 2) == []
    assert _evenly([1 << 20] * 4, 2) == [slice(0, 4)]
    assert _evenly([8 << 20] * 5, 2) == [slice(0, 3), slice(3, 5)]
    goals = [torch.zeros(1 << 20) for _ in range(5)]
    sources = [torch.full((1 << 20,), float(number)) for number in range(5)]
    copy(goals, sources)
    assert all(torch.equal(goal, source) for goal, source in zip(goals, sources, strict=True))


# ---- two real ranks


@pytest.fixture(scope="module")
def reported(programs: WarmPrograms, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks of every scenario have found."""
    folder = tmp_path_factory.mktemp("reading")
    first, second = programs.results(PROGRAM, [(folder, rank) for rank in range(2)])
    return {name: [first[name], second[name]] for name in first}


@pytest.mark.multi
def test_bytes_cross_in_rounds_of_any_size(reported: Any) -> None:
    assert [result["exact"] for result in reported["rounds"]] == [True, True]


@pytest.mark.multi
def test_new_ranks_take_what_their_arenas_hold_and_leave_what_one_of_them_cannot_verify(reported: Any) -> None:
    for result in reported["memory"]:
        assert result["held"]
        assert result["first"] == [5, "memory", True]
        assert result["second"][0] == 5
        assert result["second"][1] != "memory"
        assert result["second"][2]
    (refusal,) = reported["memory"][0]["reported"]
    assert (refusal["step"], refusal["tier"], refusal["reason"]) == (
        5,
        "memory",
        "__1_0.distcp chunk 0: digest differs",
    )
    assert reported["memory"][1]["reported"] == [], "only rank 0 tells"


@pytest.mark.multi
def test_the_last_bit_of_the_last_rank_keeps_all_tensors_as_they_were(reported: Any) -> None:
    for result in reported["the_last_chunk"]:
        assert "__1_0.distcp chunk 0: digest differs" in result["reason"]
        assert result["untouched"]


@pytest.mark.multi
def test_files_on_other_nodes_disks_are_read_there_and_sent(reported: Any) -> None:
    for result in reported["disks_of_nodes"]:
        assert result["found"] == [1, True]
        assert result["untouched"]
    kind, refusal = reported["disks_of_nodes"][0]["last"]
    assert (kind, refusal["reason"]) == ("checkpoint.refused", "__0_0.distcp: missing")


@pytest.mark.multi
def test_bytes_read_stay_close_to_bytes_needed(reported: Any) -> None:
    for result in reported["replicated"]:
        assert [exact for exact, *_ in result.values()] == [True] * 3
        assert result["whole"][1] < 2.02, "two replicas read for themselves"
        assert result["rows"][1] < 1.02
        assert result["columns"][1] < 1.02
        assert all(0.99 < needed < 1.01 for *_, needed in result.values())
