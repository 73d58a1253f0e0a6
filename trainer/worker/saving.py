"""A run's checkpoints, seen from the loop: what is saved, where it goes on after a restart, what became of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from checkpointing.durable import number
from trainer.worker import optimizer as optimizers
from trainer.worker import state
from trainer.worker.data import Data
from trainer.worker.inventory import Inventory
from trainer.worker.workload import WorkloadError


class Saver(Protocol):
    """The part of `checkpointing.engine.checkpointer.Checkpointer` that a rank uses."""

    committed_step: int | None
    failure: str | None
    save_seconds: Sequence[float]

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], extra: dict[str, Any]) -> bool: ...

    def before_optimizer_step(self) -> None: ...

    def restore(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        optional_prefixes: tuple[str, ...] = ...,
        optional_folders: tuple[str, ...] = ...,
    ) -> Any: ...

    def wait(self) -> None: ...

    def close(self, flush_for: Callable[[], float] | None = None) -> None: ...


class SaveFailed(OSError):
    """The save that the run must not end without did not happen; the event `checkpoint.failed` says why."""


class Progressed:
    """Everything that a restart must bring back, and the two directions: into a checkpoint and out of it."""

    def __init__(
        self, *, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, rank: int, device: torch.device,
        config_digest: str, seed: int, lazy: bool = False, skip: Collection[int] = (),
    ) -> None:  # fmt: skip
        """`skip`: positions in the data that are left out."""
        self._model, self._optimizer, self._data = model, optimizer, data
        self._rank, self._rng, self._device = rank, state.rng_name(rank), device
        self._config_digest, self._seed, self._skip = config_digest, seed, skip
        self._inventory = Inventory(model, optimizer, rank=rank, device=device, lazy=lazy)
        self.step = 0
        self.loss = float("nan")

    def save(self, saver: Saver) -> bool:
        """Hand the state after `step` to the checkpointer; False when it takes none now, on every rank alike."""
        extra = state.facts(
            step=self.step,
            consumed=self._data.consumed,
            left_out=sum(position < self._data.consumed for position in self._skip),
            loss=self.loss,
            config_digest=self._config_digest,
            seed=self._seed,
            fingerprint=getattr(self._data, "fingerprint", None),
        )
        return saver.save(self.step, self._inventory.tensors(), extra)

    def restore(self, saver: Saver) -> None:
        """Fill everything from the newest checkpoint that verifies; stay at step 0 when there is none.

        The saver prepares itself first: a copy in memory is only recognized by who knows how it lies there.
        """
        optimizers.prime(self._optimizer)
        saver.prepare(self._inventory.tensors())
        packed = torch.zeros_like(state.pack_rng(self._device))
        buffers = state.rank_buffers(self._model, self._rank)
        first = {key: torch.zeros_like(buffer) for key, buffer in state.rank_buffers(self._model, 0).items()}
        restored = saver.restore(
            {**self._tensors(), **first, **buffers, self._rng: packed},
            # Those of the first rank are always there: ranks that the saving world did not have begin with them.
            optional_prefixes=("rng/", *((state.buffers_name(self._rank),) if self._rank else ())),
            # A parameter that has never had a gradient has no state to save.
            optional_folders=("optimizer/",),
        )
        if restored is None:
            optimizers.forget(self._optimizer)
            return
        self._check_identity(restored.extra)
        absent = set(restored.absent)
        for (key, buffer), other in zip(buffers.items(), first.values(), strict=True):
            if key in absent:
                buffer.copy_(other)
        optimizers.forget(self._optimizer, state.without_state(self._model, absent))
        self.step, self.loss = restored.step, number(restored.extra["loss"])
        self._data.seek(restored.extra["consumed"])
        if packed.any():  # the checkpoint of a smaller world has none for this rank: it keeps its fresh one
            state.unpack_rng(packed, self._device)

    def _check_identity(self, extra: Mapping[str, Any]) -> None:
        """A position in other data, or in another order of it, would repeat some of it and leave some out."""
        now = {"seed": self._seed, "fingerprint": getattr(self._data, "fingerprint", None)}
        for key, name in (("seed", "train.seed"), ("fingerprint", "the fingerprint of the data")):
            if None not in (extra.get(key), now[key]) and extra[key] != now[key]:
                raise WorkloadError(f"{name} is {now[key]}, but the checkpoint was made with {extra[key]}")

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**state.shared_tensors(self._model), **state.optimizer_tensors(self._model, self._optimizer)}
