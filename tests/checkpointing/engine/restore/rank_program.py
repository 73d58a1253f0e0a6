"""One real rank of scenarios, each in a folder below one: arguments RANK SIZE FOLDER [[scenario, folder]...]."""

import errno
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpointing.config import CheckpointConfig, StagingConfig
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.engine.restore import restorer
from checkpointing.errors import UnreadableNow
from checkpointing.storage.backends import LocalStorage, Storage, open_storage
from checkpointing.tiers.tier import RunTiers
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.in_process_writer import InProcessWriter
from tests.checkpointing.made_checkpoint import OWNER, tier_at
from tests.checkpointing.rank_process import begin, end, join

NONCE = "ab12cd34"
Placed = dict[str, Tensor]
Events = list[tuple[str, dict[str, Any]]]


def whole(seed: int) -> Placed:
    """The state as one piece: even and uneven shapes, a scalar, a replicated tensor, one too short for all ranks."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(8, 6, generator=draw),
        "uneven": torch.randn(7, 5, generator=draw),
        "columns": torch.randn(6, 9, generator=draw),
        "tiny": torch.randn(1, 3, generator=draw),
        "replicated": torch.randn(11, generator=draw),
        "step": torch.tensor(float(seed)),
    }


PLACES = {"rows": Shard(0), "uneven": Shard(0), "columns": Shard(1), "tiny": Shard(0), "replicated": Replicate()}


def placed(state: Placed) -> Placed:
    """`state` over all ranks, and this rank's own random state beside it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {
        key: distribute_tensor(tensor, mesh, [PLACES[key]]) if key in PLACES else tensor.clone()
        for key, tensor in state.items()
    }
    rank = dist.get_rank()
    return {**tensors, f"rng/rank-{rank:05d}": torch.full((4,), rank + 1.0)}


def empty() -> Placed:
    tensors = placed({key: torch.zeros_like(tensor) for key, tensor in whole(0).items()})
    return {key: tensor.zero_() if key.startswith("rng/") else tensor for key, tensor in tensors.items()}


def equal(tensors: Placed, state: Placed) -> bool:
    full = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in tensors.items()}
    return all(torch.equal(full[key], state[key]) for key in state)


def checkpointer(folder: Path, reported: Events, **options: Any) -> Checkpointer:
    storage, tier = options.pop("storage", None), options.pop("tier", None)
    if storage is not None:
        options.setdefault("link", InProcessWriter(storage))  # another process could not see what it does
    return Checkpointer(
        OWNER,
        World(),
        RunTiers((tier,), open_storage(folder)) if tier else RunTiers.single(folder, storage),
        lambda kind, data: reported.append((kind, data)),
        **{"pauses": (), **options},
    )


# ---- scenarios: each returns what the test asserts on


def save(folder: Path, reported: Events) -> dict[str, Any]:
    """Two saves with changing state and a busy main thread in between."""
    made = checkpointer(folder, reported)
    for seed in (1, 2):
        tensors = placed(whole(seed))
        assert made.save(seed, tensors, {"seed": seed})
        for tensor in tensors.values():
            tensor.mul_(0)
        for _ in range(50):  # the training group works on while the saver's group does
            dist.all_reduce(torch.ones(10))
    made.wait()
    made.close()
    return {"committed": made.committed_step}


def load(folder: Path, reported: Events) -> dict[str, Any]:
    made, tensors = checkpointer(folder, reported), empty()
    restored = made.restore(tensors)
    made.close()
    assert restored is not None
    rng = tensors[f"rng/rank-{dist.get_rank():05d}"].tolist()
    return {
        "step": restored.step,
        "exact": equal(tensors, whole(restored.extra["seed"])),
        "rng": rng,
        "absent": restored.absent,
    }


def disk_full_on_one_rank(folder: Path, reported: Events) -> dict[str, Any]:
    storage = Faulty(folder)
    made = checkpointer(folder, reported, storage=storage)
    steps = []
    for seed in (1, 2, 3):
        broken = dist.get_rank() == 1 and seed == 2
        storage.broken = lambda act, _, broken=broken: errno.ENOSPC if broken and act.startswith("write") else 0
        made.save(seed, placed(whole(seed)), {"seed": seed})
        made.wait()
        steps.append(made.committed_step)
    made.close()
    return {"committed": steps}


class OneSidedFault(LocalStorage):
    """A node that cannot read one checkpoint, while the other nodes can."""

    def open(self, path: str) -> Any:
        if dist.get_rank() == 1 and path.startswith("step-00000002") and path.endswith(".distcp"):
            raise OSError(errno.EIO, "Input/output error")
        return super().open(path)


def one_rank_cannot_read(folder: Path, reported: Events) -> dict[str, Any]:
    restorer.LATE_S = 0.1
    storage: Storage = OneSidedFault(folder)
    made, tensors = checkpointer(folder, reported, storage=storage), empty()
    try:
        made.restore(tensors)
    except UnreadableNow as error:
        return {
            "error": str(error),
            "untouched": equal(tensors, {key: torch.zeros_like(value) for key, value in whole(0).items()}),
        }
    finally:
        made.close()
    raise AssertionError("it was restored")


class OneSidedRot(LocalStorage):
    """A node whose view of one checkpoint is damaged, while the other nodes read good bytes."""

    def open(self, path: str) -> Any:
        stream = super().open(path)
        if dist.get_rank() == 1 and path.startswith("step-00000002") and path.endswith(".distcp"):
            with stream:
                return io.BytesIO(bytes(byte ^ 1 for byte in stream.read()))
        return stream


def one_rank_reads_damage(folder: Path, reported: Events) -> dict[str, Any]:
    storage: Storage = OneSidedRot(folder)
    made, tensors = checkpointer(folder, reported, storage=storage), empty()
    restored = made.restore(tensors)
    made.close()
    assert restored is not None
    return {"step": restored.step, "exact": equal(tensors, whole(restored.step))}


def a_peer_dies_in_mid_save(folder: Path, reported: Events) -> dict[str, Any]:
    made = checkpointer(folder, reported)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(9)
    made.save(1, placed_alone(), {"seed": 1})
    made.wait()
    return {"committed": made.committed_step}


def a_peer_dies_while_it_writes(folder: Path, reported: Events) -> dict[str, Any]:
    storage = Faulty(folder)
    if dist.get_rank() == 1:
        storage.broken = lambda act, _: os._exit(9) if act.startswith("write") else 0
    made = checkpointer(folder, reported, storage=storage)
    begun = made.save(1, placed(whole(1)), {"seed": 1})
    made.wait()
    return {"begun": begun, "committed": made.committed_step}


def raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def agreement(folder: Path, reported: Events) -> dict[str, Any]:
    """All ranks agree on what only one sees: a bad state, another structure, a NaN, a hung disk."""
    second = dist.get_rank() == 1
    storage = Faulty(folder, hung=lambda act: second and act.startswith("create"))
    storage.healed.set()
    made = checkpointer(folder, reported, storage=storage)
    found: dict[str, Any] = {}
    found["unsavable"] = raised(lambda: made.prepare({"x": 5 if second else torch.ones(2)}))
    state = {"model/w": torch.ones(5), f"rng/{dist.get_rank()}": torch.ones(2)}
    made.prepare(state)
    found["steps"] = raised(lambda: made.save(7 + second, state, {}))
    saved = []
    for step in (1, 2):
        state["model/w"] += 1
        if step == 2 and second:
            state["rng/more"] = torch.ones(3)
        saved.append(made.save(step, state, {}))
        made.wait()
    own = f"model/{dist.get_rank()}"
    made.save(3, {**state, own: torch.tensor([torch.nan if second else 1.0])}, {}, trained=[own])
    made.wait()
    found["refused"] = made.failure
    shuffled = torch.tensor([2, 1] if second else [1, 2])
    made.save(3, {**state, "groups/1/order": shuffled, "groups/1/mean": torch.ones(())}, {})
    made.wait()
    found["differing"] = (made.failure, made.lasting is not None)
    storage.healed.clear()
    good = {"model/w": torch.ones(5), f"rng/{dist.get_rank()}": torch.ones(2)}  # so that rank 1 writes a file
    made.prepare(good)
    hung = []
    for step in (4, 5, 6):
        good["model/w"] += 1
        hung.append(made.save(step, good, {}))
    storage.healed.set()
    made.wait()
    made.close()
    return {**found, "saved": saved, "hung": hung, "committed": made.committed_step}


def disks_of_their_own(folder: Path, reported: Events) -> dict[str, Any]:
    """Every rank is a node with a disk that the other cannot see."""
    mine = folder / f"node{dist.get_rank()}"

    def one() -> Checkpointer:
        return checkpointer(folder, reported, tier=tier_at(mine, keep=2, shared=False))

    made = one()
    for seed in (1, 2, 3):
        made.save(seed, placed(whole(seed)), {"seed": seed})
        made.wait()
    made.close()
    reader, tensors = one(), empty()
    restored = reader.restore(tensors)
    reader.close()
    assert restored is not None
    return {
        "step": restored.step,
        "exact": equal(tensors, whole(3)),
        "folders": sorted(path.name for path in mine.iterdir()),
        "manifest": (mine / restored.name / "manifest.json").read_text(),
        "committed": made.committed_step,
    }


def buckets_on_one_rank(folder: Path, reported: Events) -> dict[str, Any]:
    """Rank 1 has more than the memory that it may take for copies; rank 0's disk fails once."""
    rank, left = dist.get_rank(), [1 - dist.get_rank()]

    def broken(act: str, _: int) -> int:
        if left[0] and act.startswith("create") and act.endswith(".distcp"):
            left[0] -= 1
            return errno.EIO
        return 0

    def state(value: float) -> Placed:
        return {f"model/{rank}/{n}": torch.full((256, 1024), value + n) for n in range(5 if rank else 1)}

    config = CheckpointConfig(staging=StagingConfig(host_memory=2.5 / 1024))
    made = checkpointer(folder, reported, storage=Faulty(folder, broken), config=config, pauses=(0.0, 0.0))
    made.prepare(state(0.0))
    assert made.restore(state(0.0)) is None
    failures = []
    for step in (1, 2):
        assert made.save(step, state(100.0 * step), {})
        made.wait()
        failures.append(made.failure)
    made.close()
    again, target = checkpointer(folder, reported, config=config), state(0.0)
    again.prepare(target)
    restored = again.restore(target)
    again.close()
    exact = equal(target, state(200.0))
    return {"failures": failures, "committed": made.committed_step, "step": restored and restored.step, "exact": exact}


class Odd(Exception):
    """An unexpected kind of error."""


def a_lane_dies(folder: Path, reported: Events) -> dict[str, Any]:
    """An unexpected error ends rank 1's saves; training continues to the end of the run."""

    class Unheard(LocalStorage):
        def create(self, path: str) -> Any:
            if dist.get_rank() == 1:
                raise Odd("what is this?")
            return super().create(path)

    made = checkpointer(folder, reported, storage=Unheard(folder))
    begun = []
    for step in (1, 2):
        begun.append(made.save(step, placed(whole(step)), {}))
        made.wait()
    dist.barrier()
    made.close()
    return {"begun": begun, "committed": made.committed_step, "failure": made.failure}


def placed_alone() -> Placed:
    return {"x": torch.ones(3)}


SCENARIOS: dict[str, Callable[[Path, Events], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        save, load, disk_full_on_one_rank, one_rank_cannot_read, one_rank_reads_damage, a_peer_dies_in_mid_save,
        a_peer_dies_while_it_writes, agreement,
        disks_of_their_own, a_lane_dies, buckets_on_one_rank,
    )
}  # fmt: skip


def main() -> None:
    begin()
    rank, size, root, scenarios = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    join(rank, size, root / f"meeting-{size}-{'-'.join(scenarios[0])}")
    results = []
    for name, folder in scenarios:
        (root / folder).mkdir(exist_ok=True)
        reported: Events = []
        results.append({**SCENARIOS[name](root / folder, reported), "reported": reported})
    end(results)
