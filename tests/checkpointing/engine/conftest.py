"""Checkpointers for a single rank, and their recorded events."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # torch complains once, when it is imported, that NumPy is not there; orch does not use it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch
    import torch.distributed.tensor

    from checkpointing.engine.checkpointer import Checkpointer
    from checkpointing.engine.collectives.group import World
    from checkpointing.engine.restore.restorer import Restored, RestoreOptions
    from checkpointing.tiers.catalog import Owner
    from checkpointing.tiers.tier import RunTiers
    from tests.checkpointing.in_process_writer import InProcessWriter

from checkpointing.config import CheckpointConfig
from checkpointing.storage.backends import Storage

NONCE = "ab12cd34"


def state(seed: int) -> dict[str, torch.Tensor]:
    """A small training state with every kind of tensor that a real one has."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(64, 33, generator=draw),
        "model.half": torch.randn(17, generator=draw).to(torch.bfloat16),
        "optim.weight.step": torch.tensor(float(seed)),
        "optim.weight.exp_avg": torch.randn(64, 33, generator=draw),
        "model.none": torch.empty(0, 4),
        "model.mask": torch.randint(0, 2, (9,), generator=draw).to(torch.bool),
        "rng/rank-00000": torch.randint(0, 255, (100,), generator=draw, dtype=torch.uint8),
    }


def blank() -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in state(0).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def loaded(restored: Restored | None) -> Restored:
    """Return what was restored; fails if nothing was."""
    assert restored is not None
    return restored


@dataclass
class Bench:
    """Makes checkpointers below one folder and collects their events."""

    root: Path
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    made: list[Checkpointer] = field(default_factory=list)

    def checkpointer(
        self,
        *,
        attempt: int = 1,
        nonce: str = NONCE,
        inherit: tuple[str, ...] = (),
        optional_names: tuple[str, ...] = (),
        corrupt: tuple[str, ...] = (),
        fence: Callable[[], bool] = lambda: True,
        keep: int = 3,
        storage: Storage | None = None,
        emit: Callable[[str, dict[str, Any]], None] | None = None,
        pauses: tuple[float, ...] = (),
        config: CheckpointConfig | None = None,
        link: Any = None,
    ) -> Checkpointer:
        made = Checkpointer(
            Owner(attempt, nonce, inherit, fence),
            World(facts={"dp_shard": 1, "tp": 1}),
            RunTiers.single(self.root, storage, keep),
            emit or (lambda kind, data: self.events.append((kind, data))),
            config=config,
            # In threads of this process, unless a test is about the other one.
            link=link or InProcessWriter(storage),
            restore=RestoreOptions(optional_names=optional_names, corrupt=corrupt),
            pauses=pauses,
        )
        self.made.append(made)
        return made

    def saved(self, *steps: int, **options: Any) -> Checkpointer:
        """A checkpointer that has saved `state(step)` at every one of `steps`."""
        made = self.checkpointer(**options)
        for step in steps:
            assert made.save(step, state(step), {"position": step * 8})
            made.wait()
        return made

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def reported(self, kind: str) -> list[dict[str, Any]]:
        return [data for each, data in self.events if each == kind]

    def folder(self, step: int, attempt: int = 1) -> Path:
        return self.root / f"step-{step:08d}.{attempt:03d}-{NONCE}"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "checkpoints")
    made.root.mkdir()
    yield made
    for checkpointer in made.made:
        checkpointer.close()
