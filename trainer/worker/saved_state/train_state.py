"""State of a training run, saved into checkpoints and restored at a restart."""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from checkpointing.engine.restore.source import OptionalKeys
from checkpointing.errors import SaveFailed
from checkpointing.storage.digests import digest
from checkpointing.storage.durable import dump_line, number
from trainer.parallel.apply.frozen_base import FROZEN_BASE, frozen_base, saved_parameters
from trainer.parallel.apply.mesh import Layout
from trainer.worker import optimizer as optimizers
from trainer.worker.data import Data, Positions, unwrap_data
from trainer.worker.saved_state import checkpoint_contents
from trainer.worker.saved_state.checkpoint_contents import buffers_name
from trainer.worker.saved_state.data_state import FACTS, DataState, plain_position
from trainer.worker.saved_state.load_hooks import run_load_hooks
from trainer.worker.saved_state.loss_scale import LossScale
from trainer.worker.saved_state.model_state import (
    BufferState,
    ModelEntries,
    ModuleExtraState,
    ModuleModes,
    ParameterForms,
    SharedMemory,
    extra_prefix,
    nan_weights,
)
from trainer.worker.saved_state.object_state import ObjectState
from trainer.worker.saved_state.optimizer_state import OptimizerState
from trainer.worker.saved_state.rng_state import pack_rng, rng_name, seed_by_data, set_origin, unpack_rng
from trainer.worker.saved_state.scheduler_state import SchedulerState
from trainer.worker.saved_state.unsaved_state import OBSERVED_STEPS, ModuleAttributes, StateInventory, UnsavedAttributes
from trainer.worker.startup.software import FIRST, RANKS, changed_software, software, software_facts
from trainer.worker.workload import BaseWorkload, Scheduler, Workload, WorkloadError


@dataclass(frozen=True, kw_only=True)
class TrainObjects:
    """The workload and the objects it built, sharded and on their device."""

    workload: Workload
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data
    layout: Layout
    scheduler: Scheduler | None = None
    """The workload's own scheduler. If None, the learning rate follows `optimizer.lr`."""
    set_initial_weights: Callable[[], None] | None = None
    """Initializer to call if no checkpoint is restored. If None, the model already has its initial weights."""


class RankCheckpointer(Protocol):
    """Subset of `checkpointing.engine.checkpointer.Checkpointer` that a rank uses."""

    committed_step: int | None
    failure: str | None
    lasting: SaveFailed | None

    @property
    def save_seconds(self) -> Sequence[float]: ...

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], extra: dict[str, Any],
        rank_state: dict[str, Any] | None = ..., trained: Collection[str] = ...,
    ) -> bool: ...  # fmt: skip

    def before_optimizer_step(self) -> None: ...

    def restore(
        self,
        tensors: Callable[[dict[str, Any]], Mapping[str, torch.Tensor]],
        optional_keys: OptionalKeys = ...,
    ) -> Any: ...

    def wait(self) -> None: ...

    def close(self, flush_for: Callable[[], float] | None = None) -> None: ...


_COMPLETE = ("model/", "optimizer/", "entries/", "workload:", buffers_name(0))
"""Prefixes of the checkpoint keys that some rank must load. Tensors of parameter groups that no saved value refers to
are unchanged settings, which the program makes anew.
"""


def _ignore_warning(step: int, *reason: Any) -> None:
    """Discard a warning that the caller does not want."""


def _require_load(workload: object) -> None:
    """Raise WorkloadError for a workload that returns a state but cannot load it."""
    kind = type(workload)
    gives = getattr(kind, "state_dict", BaseWorkload.state_dict) is not BaseWorkload.state_dict
    if gives and getattr(kind, "load_state_dict", BaseWorkload.load_state_dict) is BaseWorkload.load_state_dict:
        raise WorkloadError(
            f"{kind.__name__} has state_dict() but no load_state_dict(), so a restart could not restore it: add "
            "load_state_dict(state)"
        )


class TrainState:
    """The complete state that a restart must restore. It is saved into and restored from checkpoints."""

    def __init__(
        self, objects: TrainObjects, *, config_digest: str, seed: int, lazy: bool = False,
        loss_scale: LossScale | None = None,
        warn: Callable[[int, str], None] = _ignore_warning,
        on_other_software: Callable[[int, dict[str, Any], dict[str, int]], None] = _ignore_warning,
    ) -> None:  # fmt: skip
        """Record the state of a new model and optimizer.

        `on_other_software` is called on all ranks with the step of the restored checkpoint and the results of
        `changed_software`. `warn` is called with a step and a reason, once per reason, for state that is not saved or
        could not be restored. On rank 0, it receives the warnings of all ranks.
        """
        model, optimizer, rank, device = objects.model, objects.optimizer, objects.layout.rank, objects.layout.device
        self._model, self._optimizer, self._data = model, optimizer, objects.data
        self._rank, self._rng, self._device = rank, rng_name(rank), device
        self._ranks = objects.layout.world_size
        self._generator_rank = objects.layout.generator_rank
        self._config_digest, self._seed = config_digest, seed
        self._software, self._on_other_software = software(device), on_other_software
        self._software_facts = software_facts([self._software])
        self._saved_software = dict[str, Any]()
        self._late_gather: tuple[int, Callable[[Any], list[Any]]] | None = None  # first step, and how to gather
        self._parameters = ParameterForms(model)
        self._entries = ModelEntries(model)
        self._buffers = BufferState(model, rank, device)
        self._memory, self._modes = SharedMemory(model), ModuleModes(model)
        self._module_attributes = ModuleAttributes(model)
        self._optimizer_state = OptimizerState(model, optimizer)
        self._extra_state = ObjectState(
            ModuleExtraState(model), extra_prefix(rank), model, device, called="get_extra_state() of the modules"
        )
        _require_load(objects.workload)
        self._workload_state = ObjectState(objects.workload, "workload", model, device)
        self._schedule = SchedulerState(objects.scheduler, optimizer)
        self._scheduler_state = ObjectState(
            self._schedule, "scheduler", model, device, called=type(objects.scheduler).__name__
        )
        self._has_scheduler = objects.scheduler is not None
        self._data_state = DataState(objects.data, objects.layout, model, device)
        self._attributes = UnsavedAttributes(
            {"workload": objects.workload, "optimizer": optimizer, "data": unwrap_data(objects.data)}
        )
        self._set_initial_weights = objects.set_initial_weights
        self._warn, self._warned = warn, set[str]()
        self._unshared: list[list[Any]] = []
        """Steps and reasons not yet sent to the other ranks."""
        self._nan = frozenset[str]()
        self._inventory = StateInventory(
            model, optimizer, rank=rank, device=device, lazy=lazy,
            optimizer_state=self._optimizer_state, more=self._more_tensors,
        )  # fmt: skip
        self.step = self.validated = 0
        """`validated` is the newest step with a validation."""
        self.loss = float("nan")
        self.loss_scale = loss_scale or LossScale("float32")
        self.accepted_losses = deque[float]()
        """Losses of the newest steps without a spike, used to detect spikes. They are the same on all ranks."""
        self.positions = Positions(objects.data)
        self.metrics: dict[str, float] = {}
        """The workload's metrics of this step."""

    def _more_tensors(self) -> dict[str, torch.Tensor]:
        return {
            **self._workload_state.tensors(), **self._scheduler_state.tensors(), **self._data_state.tensors(),
            **self._extra_state.tensors(),
        }  # fmt: skip

    def save(self, saver: RankCheckpointer) -> bool:
        """Pass the state to the checkpointer. Return False if it cannot accept a save now. Raises WorkloadError."""
        with ExitStack() as asked:
            for state in (self._workload_state, self._scheduler_state, self._data_state, self._extra_state):
                asked.enter_context(state.freeze_state())
            return self._save(saver)

    def _save(self, saver: RankCheckpointer) -> bool:
        self._parameters.refuse_changed()
        self._entries.refuse_changed()
        self._workload_state.separate_ranks(self._rank)
        extra = {
            "step": self.step,
            "consumed": plain_position(self._data.consumed),
            "position": self.positions.next,
            "loss": self.loss,
            "config_digest": self._config_digest,
            "seed": self._seed,
            "fingerprint": getattr(self._data, "fingerprint", None),
            **self._software_facts,
            "validated": self.validated,
            "metrics": dict(self.metrics),
            "accepted_losses": list(self.accepted_losses),
            "ranks": self._ranks,
        }
        if loss_scale := self.loss_scale.facts():
            extra["loss_scale"] = loss_scale
        if names := checkpoint_contents.shared_names(self._model):
            extra[checkpoint_contents.SHARED_NAMES] = names
        if base := frozen_base(self._model):
            extra[FROZEN_BASE] = base.digest
        tensors = self._inventory.tensors()
        set_origin(tensors[self._rng], self._rank, self.step)
        facts, trained = self._facts(tensors), self._inventory.trained_keys() - self._nan
        try:
            accepted = saver.save(self.step, tensors, extra, facts, trained)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise WorkloadError(f"step {self.step} cannot be saved: {error}") from error
        if self._late_gather is not None and self.step >= self._late_gather[0]:
            (_, gather), self._late_gather = self._late_gather, None
            self._share_reasons(gather(self._unshared))
        return accepted

    def compare_ranks(self, gather: Callable[[Any], list[Any]]) -> None:
        """Gather every rank's software, and report differences and lost state. Collective; call it after `restore`.

        A later save gathers the warnings from the first steps.
        """
        answers = gather([self._software, self._unshared])
        of_ranks = [each for each, _ in answers]
        self._software_facts = software_facts(of_ranks)
        changes, ranks = changed_software(self._saved_software, of_ranks)
        if changes:
            self._on_other_software(self.step, changes, ranks)
        self._share_reasons([reasons for _, reasons in answers])
        self._late_gather = self.step + OBSERVED_STEPS, gather

    def _share_reasons(self, of_ranks: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Report on rank 0 any lost state that only other ranks have found."""
        self._unshared = []
        found: dict[tuple[int, str], list[int]] = {}
        for rank, reasons in enumerate(of_ranks):
            for step, reason in reasons:
                found.setdefault((step, reason), []).append(rank)
        for (step, reason), ranks in found.items():
            if self._rank == 0 and reason not in self._warned:
                more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
                self._warn_once(f"rank {ranks[0]}{more}: {reason}", step)

    @property
    def software_digest(self) -> str:
        """Eight hex digits that identify the software of all ranks."""
        return digest(dump_line(self._software_facts).encode())[:8]

    def step_ended(self) -> None:
        """Report lost attributes. Raises WorkloadError if the optimizer has groups that a restart would not have."""
        self._optimizer_state.groups.refuse_other_groups()
        if names := self._module_attributes.step_ended():
            self._warn_once(
                f"{', '.join(names)} had changed in the model and is not saved: set it in the workload's "
                "load_state_dict(), or make it a buffer",
                self._module_attributes.step,
            )

    def report_incomplete(self, restored: int, reason: str) -> None:
        """Report other state that the checkpoint of step `restored` did not restore. No-op for an empty reason."""
        if reason:
            self._warn_once(reason, restored)

    def _facts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        found = {
            "optimizer": self._optimizer_state.facts(tensors),
            "workload": self._workload_state.facts(),
            "scheduler": self._scheduler_state.facts(),
            FACTS: self._data_state.facts(),
            "buffers": self._buffers.facts(),
            "extra_state": self._extra_state.facts(),
            "parted_memory": self._memory.facts(),
            "modes": self._modes.facts(),
            "attributes": self._attributes.changed_attributes(),
            "module_attributes": self._module_attributes.changed_attributes(),
        }
        for name in self._workload_state.reordered_sets | self._data_state.reordered_sets:
            self._warn_once(f"{name} is a set, whose order a restart changes: if order matters, use a list, or sort it")
        for reason in self._optimizer_state.unsaved_values():
            self._warn_once(f"{reason} is not saved: its type cannot be serialized")
        return {key: value for key, value in found.items() if value}

    def _warn_once(self, reason: str, step: int | None = None) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            step = self.step if step is None else step
            self._warn(step, reason)
            if self._rank:
                self._unshared.append([step, reason])

    def _rank_facts(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's facts in a checkpoint, or rank 0's if the saved world did not have this rank."""
        states = extra.get("rank_state") or [{}]
        return dict(states[self._rank if self._rank < len(states) else 0])

    def restore(self, saver: RankCheckpointer) -> None:
        """Restore the newest checkpoint that verifies. Without a checkpoint, start at step 0."""
        self._optimizer_state.prime()
        self._prepare(saver)
        packed = torch.zeros_like(pack_rng(self._device))
        restored = saver.restore(
            lambda extra: {**self._targets(extra), self._rng: packed},
            # A parameter that never had a gradient has no saved state.
            optional_keys=OptionalKeys(together=("optimizer/",), complete=_COMPLETE),
        )
        if restored is None:
            self._optimizer_state.reset()
            self._inventory.forget()
            if self._set_initial_weights is not None:
                self._set_initial_weights()
            self._nan = nan_weights(self._model)
            return
        self._check_identity(restored.extra)
        self._saved_software = {key: restored.extra[key] for key in (FIRST, RANKS) if key in restored.extra}
        absent = set(restored.absent)
        self.step, self.loss = restored.step, number(restored.extra["loss"])
        self.metrics = {name: number(value) for name, value in restored.extra.get("metrics", {}).items()}
        # Imported checkpoints have only step, loss, seed and `consumed`.
        self.validated = int(restored.extra.get("validated", self.step))
        self.loss_scale.restore(restored.extra.get("loss_scale", {}))
        self.accepted_losses.extend(float(loss) for loss in restored.extra.get("accepted_losses", ()))
        self._data_state.restore(restored.extra["consumed"])
        self.positions.seek(restored.extra.get("position", restored.extra["consumed"]))
        self._buffers.restore()
        self._inventory.forget()
        self._restore_extra_state(restored.extra)
        for reason in run_load_hooks(self._model):
            self._warn_once(reason)
        self._restore_rest(self._rank_facts(restored.extra), absent)
        self._module_attributes.begin(self._rank_facts(restored.extra).get("module_attributes", {}), self.step)
        if packed.any():
            unpack_rng(packed, self._device)
        else:  # the checkpoint of a smaller world has no generators for this rank
            seed_by_data(self._seed, self._generator_rank, self.step)
        self._nan = nan_weights(self._model)

    def _prepare(self, saver: RankCheckpointer) -> None:
        try:
            saver.prepare(self._inventory.tensors())
        except (NotImplementedError, TypeError, ValueError) as error:
            raise WorkloadError(f"the state cannot be saved: {error}") from error

    def _restore_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Restore the extra state of modules, if any. With imported weights, they keep their initial state."""
        saved = self._rank_facts(extra).get("extra_state", {})
        if "imported" not in extra or saved:
            self._extra_state.restore(saved or {"value": {"dict": []}})

    def _restore_workload(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore the workload's state. Return a message if the checkpoint lacks it."""
        self._workload_state.restore(saved)
        if saved or not self.step or not self._workload_state.facts():
            return []
        return ["the state of the workload is missing: it starts again"]

    def _restore_scheduler(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore the scheduler's state. Return messages about differences from the workload's scheduler."""
        if self._has_scheduler:
            self._scheduler_state.restore(saved)
            missing = [] if saved or not self.step else ["the state of the scheduler is missing: it starts again"]
            return [*missing, *self._schedule.overruled]
        return ["it has a scheduler state, but the workload builds none"] if saved else []

    def _check_identity(self, extra: Mapping[str, Any]) -> None:
        """Raise WorkloadError if the data or its order has changed, because training would repeat or skip samples."""
        now = {"seed": self._seed, "fingerprint": getattr(self._data, "fingerprint", None)}
        for key, name in (("seed", "train.seed"), ("fingerprint", "the fingerprint of the data")):
            if None not in (extra.get(key), now[key]) and extra[key] != now[key]:
                raise WorkloadError(f"{name} is {now[key]}, but the checkpoint was saved with {extra[key]}")
        base = frozen_base(self._model)
        if base is not None and extra.get(FROZEN_BASE, base.digest) != base.digest:
            raise WorkloadError(
                f"the base model in {base.place} is not the one that this run was trained with (digest {base.digest}, "
                f"saved {extra[FROZEN_BASE]}): put its original files and workload.args back"
            )

    def _targets(self, extra: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        own = self._rank_facts(extra)
        self._memory.restore(own.get("parted_memory", ()))
        buffers = self._buffers.targets(extra.get("rank_state") or [{}], extra)
        return {
            **{f"model/{name}": parameter.detach() for name, parameter in saved_parameters(self._model)},
            **buffers,
            **self._extra_state.targets(own.get("extra_state", {})),
            **self._optimizer_state.targets(own.get("optimizer")),
            **self._workload_state.targets(own.get("workload", {})),
            **self._scheduler_state.targets(own.get("scheduler", {})),
            **self._data_state.targets(extra.get("rank_state") or []),
        }

    def _restore_rest(self, own: Mapping[str, Any], absent: Collection[str]) -> None:
        """Restore everything except the model, whose tensors are already filled. Report lost state."""
        lost = self._optimizer_state.restore(own.get("optimizer"), absent)
        optimizers.train_mode(self._optimizer)  # it may have been saved during an evaluation
        lost += self._restore_scheduler(own.get("scheduler", {}))
        lost += self._restore_workload(own.get("workload", {}))
        lost += self._modes.restore(own.get("modes", {}))  # after the workload, which may build or set some itself
        names = self._attributes.lost_attributes(own.get("attributes", {}))
        if names:
            lost.append(f"{', '.join(names)} had changed and is not saved: return it in the workload's state_dict()")
        for reason in lost:
            self._warn_once(reason)
