"""Lightning (PyTorch Lightning): checkpoints `...step=STEP...ckpt`, files or folders of shards."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trainer.agent.adapters.host import AdapterHost

SAVE_AND_GO_ON = 1

_STEP = re.compile(r"step[=_-]?(\d+)", re.ASCII)


def install(module: Any, host: AdapterHost) -> None:
    """Add a callback to every `fit`, and offer the newest checkpoint of the run to the one that saves in its folder.

    `module` is `lightning.pytorch.trainer.trainer` or its older name.
    """
    package = module.__name__.rpartition(".trainer.trainer")[0]
    callback = _callback_class(sys.modules[f"{package}.callbacks"].Callback, host)
    fit = module.Trainer.fit
    prepare = host.guard(functools.partial(_add_callback, callback))
    choose = host.guard(Fits(os.environ.get("ORCH_RESUME_PATH", ""), host).begin)

    @functools.wraps(fit)
    def fit_with_callback(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(self)
        if chosen := choose(self):
            args, kwargs = args[:4], {**kwargs, "ckpt_path": chosen}
        return fit(self, *args, **kwargs)

    module.Trainer.fit = fit_with_callback
    _report_saves(module.Trainer, host)
    host.guard(_use_torchrun_variables)(package)


def _add_callback(callback: Any, trainer: Any) -> None:
    if not any(isinstance(one, callback) for one in trainer.callbacks):
        trainer.callbacks.append(callback())


class SavePlace(NamedTuple):
    """Folder in which a `fit` saves. Below a `root`, Lightning chooses the names: `lightning_logs/version_0`."""

    folder: str
    is_root: bool = False

    def covers(self, folder: str) -> bool:
        below = self.is_root and folder.startswith(os.path.join(self.folder, ""))
        return folder == self.folder or below


def _find_places(trainer: Any) -> list[SavePlace]:
    dirpaths = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
    places = [SavePlace(os.path.realpath(folder)) for folder in dirpaths if folder]
    if places and all(dirpaths):
        return places
    roots = [trainer.default_root_dir, *(logger.save_dir for logger in trainer.loggers)]
    return places + [SavePlace(os.path.realpath(root), is_root=True) for root in roots if root]


class Fits:
    """Fits of this process. A program may train several models, as one per fold."""

    def __init__(self, offered: str, host: AdapterHost) -> None:
        self._offered, self._host = offered, host
        self._places: list[SavePlace] = []

    def begin(self, trainer: Any) -> str:
        """Return the path to resume from instead of the program's own `ckpt_path`, or "" to keep that.

        If two fits save in one place, the agent offers nothing from then on: a checkpoint there may be of either.
        """
        if any(getattr(one, "_early_exit", False) for one in trainer.callbacks):  # a trial of Lightning's Tuner
            return ""
        if os.environ.get("ORCH_RESUME_EARLIER"):  # the program decides about checkpoints from before the run
            self._offered = ""
        places, folder = _find_places(trainer), os.path.realpath(os.path.dirname(self._offered))
        chosen = self._offered if any(place.covers(folder) for place in places) else ""
        if chosen:
            self._offered = ""
        pairs = [(one, other) for one in places for other in self._places]
        mixed = any(one.covers(other.folder) or other.covers(one.folder) for one, other in pairs)
        self._places += places
        self._host.rank.begin_training(resumes=bool(chosen), mixed=mixed)
        return chosen


def _use_torchrun_variables(package: str) -> None:
    """Replace an explicit SLURMEnvironment, which expects one Slurm task per rank and requeues jobs by itself."""
    connector = sys.modules[f"{package}.trainer.connectors.accelerator_connector"]
    choose = connector._AcceleratorConnector._choose_and_init_cluster_environment

    @functools.wraps(choose)
    def choose_environment(self: Any) -> Any:
        chosen, elastic = choose(self), connector.TorchElasticEnvironment
        return elastic() if isinstance(chosen, connector.SLURMEnvironment) and elastic.detect() else chosen

    connector._AcceleratorConnector._choose_and_init_cluster_environment = choose_environment


def _report_saves(trainer: Any, host: AdapterHost) -> None:
    save = trainer.save_checkpoint
    enter = host.guard(lambda: host.rank.enter("checkpoint"))

    def report(self: Any, path: Any, complete: bool) -> None:
        host.rank.leave("checkpoint")
        if complete:
            host.saved(self.global_step, os.path.abspath(os.fspath(path)))

    end = host.guard(report)

    @functools.wraps(save)
    def save_checkpoint(self: Any, filepath: Any, weights_only: Any = None, *args: Any, **kwargs: Any) -> Any:
        complete = False
        enter()
        try:
            result = save(self, filepath, weights_only, *args, **kwargs)
            complete = not weights_only  # weights alone cannot continue the training
            return result
        finally:
            end(self, filepath, complete)

    trainer.save_checkpoint = save_checkpoint


def _save(trainer: Any) -> None:
    """Save on all ranks, unless a ModelCheckpoint has just saved this step."""
    step = trainer.global_step
    savers = [one for one in trainer.checkpoint_callbacks if not getattr(one, "save_weights_only", False)]
    if any(getattr(one, "_last_global_step_saved", -1) == step for one in savers):
        return
    folder = next((one.dirpath for one in savers if getattr(one, "dirpath", None)), None)
    folder = folder or os.path.join(trainer.default_root_dir, "checkpoints")
    trainer.save_checkpoint(os.path.join(folder, f"epoch={trainer.current_epoch}-step={step}.ckpt"))


def _read_loss(trainer: Any, outputs: Any) -> float | None:
    """Return the loss of this step, or None. A loss on a GPU is read only when Lightning itself reads its metrics."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is None or not hasattr(loss, "item"):
        return None
    on_cpu = getattr(getattr(loss, "device", None), "type", "") == "cpu"
    return float(loss.item()) if on_cpu or trainer._logger_connector.should_update_logs else None


def _callback_class(base: Any, host: AdapterHost) -> Any:
    """Return a Callback that reports to the agent and saves when all ranks agree to."""

    class LightningCallback(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.step = -1

        @host.guard
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.step = trainer.global_step
            host.answer_requests()

        @host.guard
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            step = trainer.global_step
            if step == self.step:  # a micro-batch of an accumulated step
                return
            self.step = step
            total = trainer.estimated_stepping_batches
            total = int(total) if 0 < total < 1 << 62 else 0
            host.rank.step(number=step, total=total, loss=_read_loss(trainer, outputs))
            reason = host.due(step)
            if reason:
                _save(trainer)
            if reason > SAVE_AND_GO_ON:
                host.leave()

        @host.guard
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            host.rank.enter("eval")

        @host.guard
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            host.rank.leave("eval")

        @host.guard
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            host.finish(trainer.global_step)

    return LightningCallback


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Return checkpoints with a step in their names, lowest step first. Raises OSError.

    `last.ckpt` has no step: it is a copy of another one or a link to it.
    """
    found = [(_STEP.search(name), name) for name in os.listdir(folder) if name.endswith(".ckpt")]
    return sorted((int(match[1]), os.path.join(folder, name)) for match, name in found if match)


def damage(path: str) -> str:
    """Return why a checkpoint is incomplete, or "" if it is complete. Raises OSError."""
    if not os.path.isdir(path):
        return "" if os.path.getsize(path) else "is empty"
    names = set(os.listdir(path))
    if "meta.pt" not in names and "checkpoint" not in names:
        return "lacks meta.pt"
    return "lacks .metadata" if "meta.pt" in names and ".metadata" not in names else ""


def resume(path: str) -> tuple[dict[str, str], list[str]]:
    """Return the variable from which `install` takes the `ckpt_path` of `fit`."""
    return ({"ORCH_RESUME_PATH": path} if path else {}), []
