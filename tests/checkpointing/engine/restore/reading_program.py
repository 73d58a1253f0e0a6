"""One of two real ranks in scenarios of reading: arguments FOLDER RANK; prints one JSON line."""

import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpointing.engine.collectives.group import RankGroup
from checkpointing.engine.restore import loader
from checkpointing.engine.restore.loader import Send, exchange
from checkpointing.engine.restore.read_buffers import ReadBuffers
from checkpointing.engine.restore.restorer import Restorer
from checkpointing.engine.restore.source import OptionalKeys, number_chunks
from checkpointing.errors import NothingVerifies
from checkpointing.format.read_plan import Strip
from checkpointing.writer.arena import Arena
from tests.checkpointing.engine.restore.rank_program import checkpointer, empty, equal, placed, whole
from tests.checkpointing.in_process_writer import InProcessWriter
from tests.checkpointing.made_checkpoint import OWNER, tier_at
from tests.checkpointing.rank_process import begin, end, join

NONCE = "ab12cd34"
SIZE = 2


def untouched(tensors: dict[str, Tensor]) -> bool:
    return all(not (value.to_local() if isinstance(value, DTensor) else value).any() for value in tensors.values())


# ---- scenarios


def rounds(folder: Path) -> dict[str, Any]:
    """Bytes of uneven strips both ways, in rounds of very few bytes."""
    rank, ranks = dist.get_rank(), RankGroup(None)
    memory = bytearray((7 * at + rank) % 256 for at in range(8192))
    shards = number_chunks([("a", 4096, 4096, None), ("b", 4096, 4096, None)])
    buffers = ReadBuffers.from_memory(memoryview(memory), [(shards[0], 0), (shards[1], 4096)])
    rows = [Strip(10, 9, 50, 7), Strip(600, 1, 100, 100)]
    sends = [Send(rows, 0, 3, 70), Send(rows, 1, 60, 140 + 20 * rank)]
    coming = [torch.zeros(67, dtype=torch.uint8), torch.zeros(100 - 20 * rank, dtype=torch.uint8)]
    peer = 1 - rank
    with patch.multiple(loader, ROUND=2 * 13, _SMALLEST=13):
        exchange(
            ranks,
            buffers,
            [sends if to == peer else [] for to in range(2)],
            [coming if at == peer else [] for at in range(2)],
        )
    packed = [10 + 50 * row + byte for row in range(9) for byte in range(7)] + list(range(600, 700))
    expected = [
        [(7 * at + peer) % 256 for at in packed[3:70]],
        [(7 * (at + 4096) + peer) % 256 for at in packed[60 : 140 + 20 * peer]],
    ]
    return {"exact": [goal.tolist() for goal in coming] == expected}


def memory(folder: Path) -> dict[str, Any]:
    """Both ranks are new, their arenas are not; replicated tensors are in one of them only. Then one is damaged."""
    reported: list[Any] = []
    link = InProcessWriter(arena=Arena.create())
    first = checkpointer(folder, [], link=link)
    for seed in (4, 5):
        first.save(seed, placed(whole(seed)), {"seed": seed})
        first.wait()
    results: dict[str, Any] = {"held": link.arena.record(0) is not None and link.arena.record(1) is not None}
    second = checkpointer(folder, reported, link=InProcessWriter(arena=link.arena))
    target = empty()
    second.prepare(target)
    found = second.restore(target)
    results["first"] = [found and found.step, found and found.tier, equal(target, whole(5))]
    if dist.get_rank() == 1:
        newest = next(at for at in (0, 1) if link.arena.record(at).step == 5)  # type: ignore[union-attr]
        link.arena.buffer(newest)[800] ^= 1
    target = empty()
    found = second.restore(target)
    results["second"] = [found and found.step, found and found.tier, equal(target, whole(found.step if found else 0))]
    return {**results, "reported": [data for kind, data in reported if kind == "checkpoint.refused"]}


def the_last_chunk(folder: Path) -> dict[str, Any]:
    """One bit of the last page of the last rank's file: no tensor of any rank changes."""
    made = checkpointer(folder, [], link=InProcessWriter())
    made.save(1, placed(whole(1)), {})
    made.close()
    if dist.get_rank() == 1:
        (shard,) = folder.glob("step-*/__1_0.distcp")
        data = bytearray(shard.read_bytes())
        data[-1] ^= 128
        shard.write_bytes(data)
    dist.barrier()
    target, again = empty(), checkpointer(folder, [], link=InProcessWriter())
    try:
        again.restore(target)
    except NothingVerifies as error:
        return {"reason": str(error), "untouched": untouched(target)}
    return {"reason": "", "untouched": False}


def disks_of_nodes(folder: Path) -> dict[str, Any]:
    """Each rank's files are on its node's own disk, and the ranks restart on each other's node."""
    shared, rank = folder / "shared", dist.get_rank()
    made = checkpointer(shared, [], link=InProcessWriter())
    made.save(1, placed(whole(1)), {"seed": 1})
    made.close()
    dist.barrier()
    (saved,) = shared.glob("step-*")
    mine = folder / f"node-{1 - rank}"
    shutil.copytree(saved, mine / saved.name, ignore=shutil.ignore_patterns(f"__{rank}_*"))
    dist.barrier()
    reported: list[Any] = []
    place = tier_at(mine, shared=False)
    restorer = Restorer([place], RankGroup(None), OWNER, lambda kind, data: reported.append((kind, data)))
    target = empty()
    found = restorer.run(target, OptionalKeys())
    results: dict[str, Any] = {"found": [found and found.step, equal(target, whole(1))]}
    for file in mine.glob("step-*/__0_0.distcp"):
        file.unlink()
    dist.barrier()
    target = empty()
    with contextlib.suppress(NothingVerifies):
        restorer.run(target, OptionalKeys())
        reported.append(("loaded", {}))
    return {**results, "untouched": untouched(target), "last": reported[-1] if reported else None}


def replicated(folder: Path) -> dict[str, Any]:
    """A tensor of several chunks, all of which one rank has written: both need all of it, or each needs its half."""
    values = torch.arange(3 << 20, dtype=torch.int64).view(1 << 10, 3 << 10)
    mesh = init_device_mesh("cpu", (SIZE,))
    reported: list[Any] = []
    made = checkpointer(folder, reported, link=InProcessWriter())
    made.save(1, {"x": distribute_tensor(values, mesh, [Replicate()]), "y": torch.ones(3)}, {})
    made.close()
    results = {}
    for name, placement in (("whole", Replicate()), ("rows", Shard(0)), ("columns", Shard(1))):
        target = distribute_tensor(torch.zeros_like(values), mesh, [placement])
        again = checkpointer(folder, [], link=InProcessWriter())
        found = again.restore({"x": target, "y": torch.zeros(3)})
        again.close()
        assert found is not None, reported
        exact = torch.equal(target.full_tensor(), values)
        results[name] = [exact, found.bytes_read / values.nbytes, found.bytes_needed / values.nbytes]
    return results


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    scenario.__name__: scenario for scenario in (rounds, memory, the_last_chunk, disks_of_nodes, replicated)
}


def main() -> None:
    begin()
    root, rank = Path(sys.argv[1]), int(sys.argv[2])
    join(rank, SIZE, root / "meeting")
    results = {}
    for name, scenario in SCENARIOS.items():
        (root / name).mkdir(exist_ok=True)
        results[name] = scenario(root / name)
    end(results)
