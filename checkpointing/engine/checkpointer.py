"""The seam between training and checkpoints: save in the background, restore what verifies."""

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from checkpointing.catalog import Catalog
from checkpointing.durable import canonical
from checkpointing.engine.failure import FAILURES, explain
from checkpointing.engine.group import Ranks
from checkpointing.engine.reader import MayLack
from checkpointing.engine.restoring import Restored, Restorer
from checkpointing.engine.saving import Job, Owner, Saver
from checkpointing.engine.staging import stage
from checkpointing.errors import SaveFailed
from checkpointing.retention import delete, surplus
from checkpointing.storage import Storage

__all__ = ["Checkpointer", "Restored"]

_log = logging.getLogger(__name__)


class Checkpointer:
    """One per rank and generation; all ranks call the same methods in the same order.

    `on_event` is called on rank 0 (for a broken group: on every rank that notices), for saves from the saving thread.
    `extra` is rank 0's; `fence` is asked before every COMMIT and every delete.
    """

    def __init__(
        self,
        root: Path,
        *,
        token_attempt: int,
        nonce: str,
        inherit: Sequence[str],
        process_group: dist.ProcessGroup | None,
        fence: Callable[[], bool],
        keep: int,
        on_event: Callable[[str, dict[str, Any]], None],
        world: dict[str, Any],
        storage: Storage | None = None,
    ) -> None:
        """Create the process group of the saves: collective, on the caller's thread, before any training step."""
        self._catalog = Catalog(root, storage)
        self._owner = Owner(token_attempt, nonce, tuple(inherit), fence)
        self._keep, self._on_event, self._world = keep, on_event, _plain(world, "world")
        self._untold: list[tuple[str, dict[str, Any]]] = []
        self._ranks = Ranks(process_group)
        self._saver = Saver(self._catalog, self._ranks, self._owner, self._tell)
        self._restorer = Restorer(self._catalog, self._ranks, self._owner, self._tell)
        self._thread: threading.Thread | None = None
        self.committed_step: int | None = None
        """Step of the newest checkpoint that this object has committed or restored; settled after `wait`."""
        self.failure: str | None = None
        """Why the newest save did not happen, known on every rank; None when it did. Settled after `wait`."""

    def save(self, step: int, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
        """Copy the state, then write it in the background; waits for an earlier save first.

        DTensors are saved in shards, plain tensors once. Raises ValueError or TypeError for state that cannot be saved;
        whatever goes wrong later is the event `checkpoint.failed`, and `committed_step` stays behind.
        """
        self.wait()
        job = Job(step=step, staged=stage(tensors), extra=_plain(extra, "extra"), world=self._world)
        # A daemon: a rank that must die does not wait for peers that are already gone.
        self._thread = threading.Thread(target=self._save, args=(job,), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def _save(self, job: Job) -> None:
        self.failure = None
        try:
            name = self._saver.run(job)
        except SaveFailed as failure:
            self.failure = failure.reason
            self._lead("checkpoint.failed", step=job.step, reason=failure.reason)
            return
        except FAILURES as error:
            # The group itself broke: nobody can speak for the others any more.
            self.failure = f"rank {self._ranks.rank}: {explain(error)}"
            self._tell("checkpoint.failed", {"step": job.step, "reason": self.failure})
            return
        self.committed_step = job.step
        if self._ranks.leads:
            self._retain(name)

    def _retain(self, newest: str) -> None:
        """Delete what retention no longer keeps and what died half-written; what fails is tried again next time."""
        owner, storage = self._owner, self._catalog.storage
        try:
            entries = self._catalog.accepted(owner.attempt, owner.nonce, owner.inherit)
            # A refused checkpoint is no substitute for a healthy one, and stays as evidence.
            trusted = [entry for entry in entries if entry.name not in self._restorer.refused]
            # After a roll-back older work may have higher steps: what was just saved never goes.
            for entry in (entry for entry in surplus(trusted, self._keep) if entry.name != newest):
                if not delete(storage, entry.name, owner.fence):
                    return
                self._tell("checkpoint.deleted", {"step": entry.step, "name": entry.name})
            for name in self._catalog.debris(owner.attempt, owner.nonce, owner.inherit):
                delete(storage, name, owner.fence)
        except OSError as error:
            _log.warning("old checkpoints could not be deleted yet: %s", error)

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        *,
        optional_prefixes: tuple[str, ...] = ("rng/",),
        optional_folders: tuple[str, ...] = (),
    ) -> Restored | None:
        """Fill `tensors` in place from the newest checkpoint that verifies; None when there is none at all.

        Keys that begin with an optional prefix may be missing from the checkpoint; below a prefix of
        `optional_folders`, the keys of one folder (up to their last slash) may be missing together. Raises
        NothingVerifies when there should be checkpoints and none can be loaded: starting from nothing is then
        somebody's decision, not ours.
        """
        self.wait()
        restored = self._restorer.run(tensors, MayLack(alone=optional_prefixes, together=optional_folders))
        self.committed_step = restored.step if restored else None
        return restored

    def wait(self) -> None:
        """Return when no save is under way and every event is told."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._flush()

    def close(self) -> None:
        """Wait, then give the process group back; raises what kept an event from being told."""
        self.wait()
        self._ranks.close()
        for kind, data in self._untold:
            self._on_event(kind, data)

    def _lead(self, kind: str, **data: Any) -> None:
        if self._ranks.leads:
            self._tell(kind, data)

    def _tell(self, kind: str, data: dict[str, Any]) -> None:
        self._untold.append((kind, data))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._untold:
                self._on_event(*self._untold[0])
                self._untold.pop(0)
        except OSError as error:
            # The disk that is too full for a checkpoint may be too full for its event: told again at the next chance.
            _log.warning("event %s could not be written yet: %s", self._untold[0][0], error)


def _plain(value: dict[str, Any], what: str) -> dict[str, Any]:
    """A copy by way of JSON, so that later changes of the caller cannot reach it; raises TypeError or ValueError."""
    try:
        copy: dict[str, Any] = json.loads(canonical(value))
    except (TypeError, ValueError) as error:
        raise type(error)(f"`{what}` must be plain JSON: {error}") from error
    return copy
