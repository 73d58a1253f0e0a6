"""Hugging Face Trainer (transformers): checkpoints `checkpoint-STEP` in its `output_dir`."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.agent.adapters.host import AdapterHost

SAVE_AND_GO_ON = 1

_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
_STATE, _SENTINEL = "trainer_state.json", "checkpoint-is-incomplete.txt"
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth)", re.ASCII)
_OTHERS = re.compile(r"(optimizer|scheduler|scaler|rng_state|training_args).*", re.ASCII)
"""Files of a Trainer that are no weights. Subclasses give their weights names of their own."""
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_RANDOM = re.compile(r"rng_state_(\d+)\.pth", re.ASCII)


def install(module: Any, host: AdapterHost) -> None:
    """Add a callback to every Trainer that trains, and offer it the newest checkpoint of the run.

    `module` is `transformers.trainer`.
    """
    trainer, callback = module.Trainer, _callback_class(module.TrainerCallback, host)
    train = trainer.train
    prepare = host.guard(functools.partial(_add_callback, callback))
    choose = host.guard(_choose_checkpoint)

    @functools.wraps(train)
    def train_with_callback(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        prepare(self)
        chosen = choose(self.args.output_dir, resume_from_checkpoint)
        return train(self, resume_from_checkpoint if chosen is None else chosen, *args, **kwargs)

    trainer.train = train_with_callback
    _report_phase(trainer, "_save_checkpoint", "checkpoint", host)
    _report_phase(trainer, "evaluate", "eval", host)


def _add_callback(callback: Any, trainer: Any) -> None:
    if not any(isinstance(one, callback) for one in trainer.callback_handler.callbacks):
        trainer.add_callback(callback())


def _choose_checkpoint(folder: str, given: Any) -> Any:
    """Return the `resume_from_checkpoint` to use instead of the given one, or None to keep that.

    A run continues from its own checkpoints. Those from before its first start are the program's choice, which may be
    an older one, or none. Trainer raises an error if it is asked to resume and its folder has no checkpoint.
    """
    offered = os.environ.get("ORCH_RESUME_PATH", "")
    if os.environ.get("ORCH_RESUME_EARLIER") and given is not True:
        return None
    if offered and os.path.realpath(os.path.dirname(offered)) == os.path.realpath(folder):
        return offered
    if given is True and not (os.path.isdir(folder) and checkpoints(folder)):
        return False
    return None


def _report_phase(trainer: Any, name: str, phase: str, host: AdapterHost) -> None:
    method = getattr(trainer, name, None)
    if method is None:
        return
    enter = host.guard(lambda: host.rank.enter(phase))
    leave = host.guard(lambda: host.rank.leave(phase))

    @functools.wraps(method)
    def report_and_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            return method(self, *args, **kwargs)
        finally:
            leave()

    setattr(trainer, name, report_and_run)


def _callback_class(base: Any, host: AdapterHost) -> Any:
    """Return a TrainerCallback that reports to the agent and saves when all ranks agree to."""

    class OrchTrainerCallback(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.reason = 0

        @host.guard
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            host.lead()
            if not getattr(args, "save_only_model", False):  # such a checkpoint cannot continue the training
                host.answer_requests()

        @host.guard
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            host.rank.step(number=state.global_step, total=max(0, state.max_steps))
            self.reason = host.due(state.global_step)
            if self.reason:
                control.should_save = True
            if self.reason > SAVE_AND_GO_ON:
                control.should_training_stop, control.should_evaluate = True, False

        @host.guard
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            loss = (logs or {}).get("loss")
            if isinstance(loss, (int, float)):
                host.rank.loss(float(loss))

        @host.guard
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            host.saved(step, os.path.abspath(os.path.join(args.output_dir, f"checkpoint-{step}")))
            if self.reason > SAVE_AND_GO_ON:
                host.leave()  # otherwise the program would evaluate, and save the model as if it were trained

        @host.guard
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            host.finish(state.global_step)

    return OrchTrainerCallback


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Return the steps and paths of the checkpoints in an `output_dir`, lowest step first. Raises OSError."""
    found = [(_NAME.fullmatch(entry.name), entry.path) for entry in os.scandir(folder) if entry.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def damage(path: str) -> str:
    """Return why a checkpoint is incomplete, or "" if it is complete. Raises OSError."""
    names = set(os.listdir(path))
    rules: tuple[Callable[[str, set[str]], str], ...] = (_state, _weights, _optimizer, _random)
    if _SENTINEL in names:
        return f"is marked as incomplete by {_SENTINEL}"
    return next((reason for reason in (rule(path, names) for rule in rules) if reason), "")


def _state(path: str, names: set[str]) -> str:
    """Rank 0 writes this file last."""
    if _STATE not in names:
        return f"lacks {_STATE}"
    try:
        with open(os.path.join(path, _STATE), encoding="utf-8") as stream:
            step = json.load(stream)["global_step"]
    except (ValueError, LookupError, TypeError) as error:
        return f"{_STATE} is unreadable: {type(error).__name__}"
    named = _NAME.fullmatch(os.path.basename(path))
    return f"{_STATE} is of step {step}" if named and int(named[1]) != step else ""


def _is_sharded(names: set[str]) -> bool:
    """Return whether DeepSpeed or FSDP wrote folders of shards, which other rules check."""
    return "latest" in names or any(name.startswith(("pytorch_model_fsdp_", "global_step")) for name in names)


def _weights(path: str, names: set[str]) -> str:
    for index in sorted(names.intersection(_INDEXES)):
        try:
            with open(os.path.join(path, index), encoding="utf-8") as stream:
                missing = sorted(set(json.load(stream)["weight_map"].values()) - names)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return f"{index} is unreadable: {type(error).__name__}"
        if missing:
            return f"lacks {missing[0]}, which {index} names"
        return ""
    has_weights = any(_WEIGHTS.fullmatch(name) and not _OTHERS.fullmatch(name) for name in names)
    has_parts = any(os.path.isdir(os.path.join(path, name)) for name in names)  # shards, or several adapters of PEFT
    return "" if has_weights or has_parts else "has no weights"


def _optimizer(path: str, names: set[str]) -> str:
    """A Trainer that finds no optimizer file starts the optimizer anew without a word.

    A checkpoint of `save_only_model` has none of these files.
    """
    has_random = "rng_state.pth" in names or any(map(_RANDOM.fullmatch, names))
    if _is_sharded(names) or not ("scheduler.pt" in names or has_random):
        return ""
    if not names & {"optimizer.pt", "optimizer.bin"} and not any(name.startswith("optimizer_") for name in names):
        return "lacks optimizer.pt: the Trainer would start the optimizer anew"
    return "" if "scheduler.pt" in names else "lacks scheduler.pt: the Trainer would start the schedule anew"


def _random(path: str, names: set[str]) -> str:
    ranks = {int(match[1]) for match in map(_RANDOM.fullmatch, names) if match}
    missing = sorted(set(range(max(ranks, default=-1) + 1)) - ranks)
    if missing:
        return f"lacks rng_state_{missing[0]}.pth"
    full = {"optimizer.pt", "scheduler.pt"} <= names
    return "lacks the ranks' random states" if full and not ranks and "rng_state.pth" not in names else ""


def resume(path: str) -> tuple[dict[str, str], list[str]]:
    """Return the variable from which `install` takes the Trainer's `resume_from_checkpoint`."""
    return ({"ORCH_RESUME_PATH": path} if path else {}), []
