"""One rank of jobs: to save layouts, or to restore a checkpoint read-only: arguments RANK SIZE FOLDER JOBS."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.checkpointing.engine.restore import layout_program, rank_program

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

from checkpointing.engine.collectives.group import World
from checkpointing.engine.restore.read_only import ReadOnlyCheckpoint
from checkpointing.engine.restore.source import local_part
from tests.checkpointing.rank_process import begin, end, join

Tensors = dict[str, torch.Tensor]


def of_layout(layout: str, folder: Path, name: str) -> dict[str, Any]:
    """A state of every kind of sharding, restored from the files of another layout."""
    tensors = layout_program.placed(layout, 0)
    keys = {"sharded": "large.weight", "norm": "norm.weight", "plain": "step"}
    return _restored_and_changed(folder, name, tensors, layout_program.whole(7), keys)


def of_ranks(size: str, folder: Path, name: str) -> dict[str, Any]:
    """Beside the shared keys, each rank has a key of its own, like its generators."""
    tensors = rank_program.empty()
    keys = {"sharded": "rows", "replicated": "replicated", "plain": f"rng/rank-{dist.get_rank():05d}"}
    return _restored_and_changed(folder, name, tensors, rank_program.whole(1), keys)


def _restored_and_changed(
    folder: Path, name: str, tensors: Tensors, expected: Tensors, keys: dict[str, str]
) -> dict[str, Any]:
    """What is found after the restore, and when one value of one of `keys` has changed on the last rank alone."""
    reported: list[str] = []
    made = ReadOnlyCheckpoint(str(folder), name, lambda kind, data: reported.append(kind), World())
    restored = made.restore(tensors)
    found = {"step": restored.step, "exact": rank_program.equal(tensors, expected), "faults": made.fingerprint_faults()}
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    for what, key in keys.items():
        part = local_part(tensors[key]).view(-1)
        before = part.clone()
        if last:
            part[-1:] += 1
        found[what] = made.fingerprint_faults()
        part.copy_(before)
    found["again"] = made.fingerprint_faults()
    made.close()
    return {**found, "reported": reported}


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every name below a folder with its inode, size and time of change."""
    found = {str(path.relative_to(root)): path.lstat() for path in (root, *root.rglob("*"))}
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found.items()}


def _untouched(mode: str, layout: str, folder: Path, step: int) -> dict[str, Any]:
    """What is found in the checkpoint of this step in `folder`, and whether the folder is unchanged."""
    before, (path,) = tree(folder), folder.glob(f"step-{step:08d}.*")
    found = {"of_layout": of_layout, "of_ranks": of_ranks}[mode](layout, folder, path.name)
    return {**found, "untouched": tree(folder) == before}


def main() -> None:
    begin()
    rank, size, root, jobs = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    results = []
    for mode, layout, *rest in jobs:
        if not dist.is_initialized() and (size > 1 or mode == "of_ranks"):
            join(rank, size, root / f"meeting-{size}")
        if mode == "save":
            results.append(layout_program.save(layout, root))
        elif mode == "save_ranks":
            results.append(rank_program.save(root / "ranks", []))
        else:
            folder, step = rest
            results.append(_untouched(mode, layout, root / folder, step))
    end(results)
