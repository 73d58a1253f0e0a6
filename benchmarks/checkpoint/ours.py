"""Orch's side: a checkpointer as the trainer uses it, with timestamps at its interfaces."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.states import BenchmarkState
from checkpointing.config import CheckpointConfig, StagingConfig
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.format.manifest import Manifest, parse
from checkpointing.owner import Owner
from checkpointing.tiers.tier import RunTiers


@dataclass(frozen=True)
class SaveTimes:
    """Seconds of one save: training paused for `stall`; `written` from then to COMMIT; `whole` is both."""

    stall: float
    written: float
    whole: float
    name: str


class Ours:
    """A checkpointer for one state set in a separate folder."""

    def __init__(self, folder: Path, state: BenchmarkState, *, mode: str = "block", **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.state = folder, state
        self.events: list[tuple[float, str, dict[str, Any]]] = []
        owner = Owner(1, "ab12cd34", (), lambda: True)
        config = CheckpointConfig(keep=2, staging=StagingConfig(mode=mode))
        tiers = RunTiers.single(folder, keep=2)
        self.checkpointer = Checkpointer(owner, World(), tiers, self._record_event, config=config, **options)
        self.checkpointer.prepare(state.tensors)

    @classmethod
    def save_once(cls, folder: Path, state: BenchmarkState) -> Path:
        """Return the folder of a checkpoint of `state` whose checkpointer is closed."""
        made = cls(folder, state)
        name = made.save().name
        made.checkpointer.close()
        return folder / name

    def _record_event(self, kind: str, data: dict[str, Any]) -> None:
        self.events.append((time.perf_counter(), kind, data))

    def save(self) -> SaveTimes:
        """Save once in block mode, until committed and old checkpoints are deleted; raises RuntimeError."""
        step = self.state.next_step()
        start = time.perf_counter()
        self.checkpointer.save(step, self.state.tensors, {})
        staged = time.perf_counter()
        committed, name = self.wait_for_commit(step)
        return SaveTimes(staged - start, committed - staged, committed - start, name)

    def wait_for_commit(self, step: int) -> tuple[float, str]:
        """Wait until `step` is saved; return its commit time and name. Raises RuntimeError if it was not committed.

        The time is the event's, so that the later deletion of older checkpoints does not count.
        """
        self.checkpointer.wait()
        for when, kind, data in reversed(self.events):
            if kind == "checkpoint.committed" and data["step"] == step:
                return when, str(data["name"])
        raise RuntimeError(f"step {step} was not committed: {[event[1:] for event in self.events[-3:]]}")

    def manifest(self, name: str) -> Manifest:
        return parse((self.folder / name / "manifest.json").read_bytes())

    def close(self) -> None:
        self.checkpointer.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return every file of a checkpoint, the largest first."""
    return sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: -path.stat().st_size)
