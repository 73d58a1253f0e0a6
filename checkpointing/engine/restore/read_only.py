"""Restore of one named checkpoint of any run without changing it, for restore tests."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpointing.engine.collectives.group import Failed, World, result_or_failed
from checkpointing.engine.restore.loader import differing_tensors, saved_fingerprints
from checkpointing.engine.restore.restorer import Restored, Restorer
from checkpointing.engine.restore.source import OptionalKeys, Targets, TensorsFor
from checkpointing.errors import CheckpointRefused, SaveFailed
from checkpointing.event_sink import EmitEvent, EventSink
from checkpointing.format.commit import parse_name
from checkpointing.owner import Owner
from checkpointing.storage.backends import open_storage
from checkpointing.tiers.catalog import Catalog
from checkpointing.tiers.tier import ResolvedTier


class ReadOnlyCheckpoint:
    """The checkpoint `name` in the folder or URL `place`, as a replacement for a `Checkpointer` that never saves.

    It writes and deletes nothing, starts no process and takes no memory for saves. All ranks call the same methods in
    the same order; `place` must show the whole checkpoint to each of them.
    """

    committed_step: int | None = None
    """Step of the checkpoint, once it is restored."""
    failure: str | None = None
    lasting: SaveFailed | None = None
    save_seconds: Sequence[float] = ()

    def __init__(self, place: str, name: str, on_event: EmitEvent, world: World) -> None:
        """Create one process group; collective. Raises ValueError if `name` is invalid, and as `open_storage` does.

        `on_event` is called on rank 0.
        """
        if parse_name(name) is None:
            raise ValueError(f"{name!r} is not the name of a checkpoint")
        path = place if "://" in place else str(Path(place).absolute())
        storage = open_storage(path)
        tier = ResolvedTier(path=path, storage=storage, catalog=Catalog(path, storage))
        # No checkpoint has an empty nonce, so this owner may load only the inherited checkpoint.
        owner = Owner(attempt=0, nonce="", inherit=(name,), fence=lambda: False)
        self._name, self._storage, self._events = name, storage, EventSink(on_event)
        self._ranks = world.group()
        self._restorer = Restorer((tier,), self._ranks, owner, self._events.emit)
        self._loaded: dict[str, Tensor] = {}
        self._saved: dict[str, str] = {}
        self._restored: Restored | None = None

    @property
    def restore_result(self) -> Restored | None:
        """Result of `restore`; None before."""
        return self._restored

    @property
    def has_fingerprints(self) -> bool:
        """Whether the checkpoint has fingerprints to compare with; known on all ranks after `restore`."""
        return bool(self._saved)

    def restore(
        self,
        tensors: Mapping[str, Tensor] | TensorsFor,
        *,
        optional_prefixes: tuple[str, ...] = ("rng/",),
        optional_folders: tuple[str, ...] = (),
        complete: tuple[str, ...] = (),
    ) -> Restored:
        """Fill `tensors` in place from this checkpoint; the arguments are those of `Checkpointer.restore`.

        Raises NothingVerifies on every rank if it cannot be loaded. A missing checkpoint is waited for as long as
        shared file systems may take to show a name, `restorer.LATE_S`.
        """
        targets = Targets(tensors)
        restored = self._restorer.run(
            targets, OptionalKeys(alone=optional_prefixes, together=optional_folders, complete=complete)
        )
        assert restored is not None, "a checkpoint that is inherited and missing is an error"
        mine: dict[str, str] | Failed | None = None
        if self._ranks.leads:
            mine = result_or_failed(lambda: saved_fingerprints(self._storage, self._name))
        saved: dict[str, str] | Failed = self._ranks.broadcast(mine)
        if isinstance(saved, Failed):
            raise CheckpointRefused(self._name, saved.reason, damaged=False)
        absent = set(restored.absent)
        self._loaded = {key: tensor for key, tensor in targets.last.items() if key not in absent}
        self._saved, self._restored, self.committed_step = saved, restored, restored.step
        return restored

    def fingerprint_faults(self) -> list[str]:
        """Return a line for each loaded tensor whose values differ from the saved ones; collective.

        The list is sorted and the same on every rank. It reads the current values, so call it before training. Tensors
        that no rank has loaded are not compared; without fingerprints (`has_fingerprints`) the list is empty. Raises
        Refused.
        """
        if not self.has_fingerprints:
            return []
        return differing_tensors(self._ranks, self._name, self._loaded, self._saved)

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing, because nothing is saved."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        extra: dict[str, Any],
        rank_state: dict[str, Any] | None = None,
        trained: Collection[str] = (),
    ) -> bool:
        """Raise RuntimeError."""
        raise RuntimeError(f"step {step} is not saved: {self._name} was opened to be read only")

    def before_optimizer_step(self) -> None:
        """Return at once, because no copy reads the tensors."""

    def wait(self) -> None:
        """Return once every event has been written or attempted."""
        self._events.flush()

    def close(self, flush_for: Callable[[], float] | None = None) -> None:
        """Release the process group; raises the error that kept an event from being written."""
        self._loaded = {}
        self._ranks.close()
        self._events.close()
