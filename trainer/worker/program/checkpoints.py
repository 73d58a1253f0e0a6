"""Asynchronous, sharded and verified checkpoints for a program with its own training loop."""

import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from checkpointing.config import CheckpointConfig
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from trainer.parallel.apply.mesh import Layout
from trainer.protocol.rank_progress.progress import StopReason
from trainer.worker.program.checkpoint_place import RUN_DIR, CheckpointPlace, find_place
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.saved_state.train_state import TrainObjects, TrainState
from trainer.worker.startup.preimport import protect_data_loader_workers
from trainer.worker.train_loop.save_schedule import SaveSchedule, SaveVote
from trainer.worker.workload import WorkloadError

_DAY = 86400.0


class ProgramCalls(Protocol):
    """Subset of `orch.program.Program` that checkpoints use."""

    cadence: Any
    stop_reason: int
    loss: float

    def saved(self, path: str, number: int | None, *, late: bool = False) -> None: ...


class ExtraObjects:
    """Further objects of a program, keyed by name, as one object with a state."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Raise WorkloadError for an object without a state."""
        for name, each in objects.items():
            has = [callable(getattr(each, method, None)) for method in ("state_dict", "load_state_dict")]
            if not (all(has) or isinstance(each, MutableMapping)):
                raise WorkloadError(
                    f"orch.checkpointer: extra[{name!r}] is a {type(each).__name__}: it needs state_dict() and "
                    "load_state_dict(), or must be a dict"
                )
        self._objects = dict(objects)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: dict(each) if isinstance(each, MutableMapping) else each.state_dict()
            for name, each in self._objects.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, each in self._objects.items():
            if name not in state:
                write_stderr(f"orch: the checkpoint has no state of extra[{name!r}]: it starts again")
            elif isinstance(each, MutableMapping):
                each.clear()
                each.update(state[name])
            else:
                each.load_state_dict(state[name])


class NoPosition:
    """Data without a position. The program's own is in `extra`."""

    consumed = 0

    def take(self) -> list[Any]:
        raise NotImplementedError("the program reads its own data")

    def seek(self, consumed: int) -> None:
        """Do nothing."""


class OwnSchedule:
    """A schedule without a state, so that the optimizer's learning rates are saved. The program's is in `extra`."""

    def step(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class Cadence:
    """Decides at which steps a save is due, alike on all ranks. Rank 0's votes reach them through `orch.program`."""

    def __init__(self, schedule: SaveSchedule, saver: Checkpointer, report_commit: Callable[[], None]) -> None:
        """`report_commit` is called after every step, because saves end in the background."""
        self._schedule, self._saver, self._report_commit = schedule, saver, report_commit
        self._vote = SaveVote.NONE
        self._mark: tuple[int, float] | None = None

    def is_due(self, number: int) -> bool:
        """Return whether to save after this step."""
        self._record_step(number)
        self._report_commit()
        vote, self._vote = self._vote, SaveVote.NONE
        return self._schedule.should_save(number, vote)

    def vote(self, number: int) -> int:
        """Return rank 0's vote."""
        saver = self._saver
        self._schedule.read_saver(saver.committed_step or 0, saver.failure, saver.save_seconds)
        return int(self._schedule.save_vote(number, 0.0))

    def record_vote(self, vote: int) -> None:
        self._vote = SaveVote(vote)

    def record_save(self, number: int, accepted: bool, stall: float) -> None:
        self._schedule.record_save(number, accepted)
        self._schedule.record_stall(stall)
        self._mark = (number, time.perf_counter())

    def _record_step(self, number: int) -> None:
        now, before = time.perf_counter(), self._mark
        if before is not None and number > before[0]:
            self._schedule.record_step((now - before[1]) / (number - before[0]))
        self._mark = (number, now)


class ProgramCheckpoints:
    """Checkpoints of a program's model, optimizer and further objects. All ranks call the same methods in order."""

    def __init__(
        self, program: ProgramCalls, place: CheckpointPlace, config: CheckpointConfig, objects: TrainObjects
    ) -> None:
        self._program, self._place, self._config, self._objects = program, place, config, objects
        self._names: dict[int, str] = {}
        self._reported = 0
        layout = objects.layout
        self._saver = Checkpointer(
            place.owner, World(facts={"size": layout.world_size}, leads_node=_leads_node(os.environ)), place.tiers,
            self._on_event, config=config, restore=place.options,
        )  # fmt: skip
        self._state = TrainState(objects, config_digest=place.config_digest, seed=0, warn=place.warn)
        self._cadence: Cadence | None = None
        self._closed = False

    def restore(self) -> int:
        """Load the newest checkpoint that verifies, in any layout, and return its step; 0 without a checkpoint.

        Raises NothingVerifies if there are checkpoints but none can be loaded. In that case nothing has been changed.
        """
        self._state.restore(self._saver)
        self._state.compare_ranks(self._saver.all_gather)
        self._set_cadence()
        return self._state.step

    def save(self, step: int) -> bool:
        """Copy the state after this step and write it in the background. Return False if the save was skipped.

        It is skipped while earlier saves are still being written. The last save before a stop waits for its commit.
        Raises SaveFailed if no later save can succeed either.
        """
        cadence, began = self._cadence or self._set_cadence(), time.perf_counter()
        last = self._program.stop_reason > StopReason.SAVE_AND_GO_ON
        self._state.step, self._state.loss = step, self._program.loss
        self._state.step_ended()
        accepted = self._state.save(self._saver)
        if last and not accepted:
            self._saver.wait()
            accepted = self._state.save(self._saver)
        cadence.record_save(step, accepted, time.perf_counter() - began)
        if last:
            self.wait()
        if self._saver.lasting is not None:
            raise self._saver.lasting
        self._report_commit()
        return accepted

    @property
    def committed_step(self) -> int | None:
        """Step of the newest checkpoint that is safe on disk."""
        return self._saver.committed_step

    def wait(self) -> None:
        """Wait until no save is running."""
        self._saver.wait()
        self._report_commit()

    def close(self) -> None:
        """Wait for the last save, and release memory and process groups. Call it before `destroy_process_group`."""
        if not self._closed:
            self._closed = True
            self.wait()
            self._program.cadence = None
            self._saver.close()
            self._place.close()

    def __enter__(self) -> "ProgramCheckpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error, the other ranks may not join the end of a save
            self.close()

    def _set_cadence(self) -> Cadence:
        config, saved = self._config, self._saver.committed_step or 0
        nodes = max(1, self._objects.layout.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
        mtbf = self._place.mtbf or config.auto.node_days * _DAY / nodes
        schedule = SaveSchedule(config, saved=saved, mtbf=mtbf, on_change=self._place.on_interval)
        self._cadence = self._program.cadence = Cadence(schedule, self._saver, self._report_commit)
        return self._cadence

    def _on_event(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "checkpoint.committed":
            self._names[data["step"]] = data["name"]
        self._place.on_event(kind, data)

    def _report_commit(self) -> None:
        """Report a new commit to the agent."""
        step = self._saver.committed_step or 0
        if step > self._reported:
            self._reported = step
            place = self._place.tiers.tiers[0].path
            self._program.saved(f"{place}/{self._names.get(step, '')}", step, late=True)


def open_checkpoints(
    program: ProgramCalls, model: Any, optimizer: Any, extra: dict[str, Any], *,
    folder: str | os.PathLike[str] | None, every: int | str, keep: int, data_parallel: tuple[int, int] | None,
) -> ProgramCheckpoints:  # fmt: skip
    """Return the checkpoints of a program. Collective. Raises WorkloadError for objects that cannot be saved."""
    config = CheckpointConfig(every=every, keep=keep)
    own = unwrap_model(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(
            f"orch.checkpointer: the optimizer is a {type(optimizer).__name__}: pass one torch optimizer, and others "
            "in `extra`"
        )
    if RUN_DIR in os.environ:
        protect_data_loader_workers()
    objects = TrainObjects(
        workload=cast(Any, ExtraObjects(extra)), model=own, optimizer=optimizer, data=NoPosition(),
        layout=_layout(own, data_parallel), scheduler=OwnSchedule(),
    )  # fmt: skip
    world = World().group()
    place = find_place(folder, config, world, os.environ)
    world.close()
    return ProgramCheckpoints(program, place, config, objects)


def unwrap_model(model: Any) -> nn.Module:
    """Return the module whose parameter names do not depend on DDP or torch.compile. Raises WorkloadError."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"orch.checkpointer: the model is a {type(model).__name__}, not a torch module")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise WorkloadError(
            "orch.checkpointer: FullyShardedDataParallel (FSDP1) flattens parameters: use `fully_shard`, or save "
            "yourself and call orch.saved(path)"
        )
    return model


def _layout(model: nn.Module, data_parallel: tuple[int, int] | None) -> Layout:
    """Return the layout of the ranks, of which checkpoints need the device and this rank's place."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    _, data_ranks = data_parallel or (rank, size)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": data_ranks, "cp": 1, "tp": size // data_ranks}
    return Layout(
        mesh=cast(Any, None), sequence_mesh=None, sizes=sizes, device=device, rank=rank, world_size=size
    )  # fmt: skip


def _leads_node(environ: Mapping[str, str]) -> bool:
    return environ.get("LOCAL_RANK", "0") == "0"
