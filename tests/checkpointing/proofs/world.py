"""What the proofs save and restore: a small state of every kind of tensor, and the checkpointers over it."""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor
    from torch import Tensor

    from checkpointing.engine.checkpointer import Checkpointer
    from checkpointing.engine.collectives import group
    from checkpointing.tiers.catalog import Owner
    from checkpointing.tiers.tier import RunTiers
    from tests.checkpointing.in_process_writer import InProcessWriter

from checkpointing.config import CheckpointConfig, StagingConfig

NONCE = "ab12cd34"
Tensors = dict[str, Tensor]


def state(step: int, *, words: int = 3000) -> Tensors:
    """The state of one step: every tensor but the empty one differs from those of other steps."""
    draw = torch.Generator().manual_seed(step)
    return {
        "model.embedding": torch.randn(words, 3, generator=draw),
        "model.half": torch.randn(517, generator=draw).to(torch.bfloat16),
        "model.mask": torch.randint(0, 2, (95,), generator=draw).to(torch.bool),
        "model.none": torch.empty(0, 4),
        "model.wide": torch.randn(7, 11, 5, generator=draw, dtype=torch.float64),
        "optim.embedding.exp_avg": torch.randn(words, 3, generator=draw),
        "optim.embedding.step": torch.tensor(float(step)),
        "rng/rank-00000": torch.randint(0, 255, (100,), generator=draw, dtype=torch.uint8),
    }


def marked(tensors: Tensors) -> Tensors:
    """Tensors of the same shapes, filled with a pattern that no saved state has."""
    return {key: torch.full_like(tensor, 1 if tensor.dtype == torch.bool else 77) for key, tensor in tensors.items()}


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(_bits(left[key]).equal(_bits(right[key])) for key in left)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def plain_load(folder: Path, target: Tensors) -> None:
    """A checkpoint as plain torch reads it: `dcp.load` of this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is alone
        dcp.load(target, checkpoint_id=folder, no_dist=True)


@dataclass
class World:
    """One folder of checkpoints and the events about it."""

    root: Path
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @contextmanager
    def checkpointer(self, *, files: int = 1, keep: int = 2, **options: Any) -> Iterator[Checkpointer]:
        self.root.mkdir(parents=True, exist_ok=True)
        config = CheckpointConfig(keep=keep, staging=StagingConfig(files=files))
        storage = options.pop("storage", None)
        if storage is not None:
            options.setdefault("link", InProcessWriter(storage))  # another process could not see what it does
        made = Checkpointer(
            Owner(1, NONCE, (), lambda: True),
            group.World(),
            RunTiers.single(self.root, storage, keep),
            lambda kind, data: self.events.append((kind, data)),
            **{"config": config, **options},
        )
        try:
            yield made
        finally:
            made.close()

    def save(self, *steps: int, **options: Any) -> None:
        """Commit `state(step)` of every one of `steps`."""
        with self.checkpointer(**options) as made:
            made.prepare(state(steps[0]))
            for step in steps:
                made.save(step, state(step), {"position": 8 * step})
                made.wait()
                assert made.committed_step == step, self.events[-3:]

    def reported(self, kind: str) -> list[dict[str, Any]]:
        return [data for each, data in self.events if each == kind]

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:08d}.001-{NONCE}"


def fresh_copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
