"""DeepSpeed: folders `TAG/` with model states and one optimizer file per rank, and the file `latest` with a tag."""

from __future__ import annotations

import functools
import os
import re
import zipfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.agent.adapters.host import AdapterHost

SAVE_AND_GO_ON = 1

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)", re.ASCII)
_MODEL = re.compile(r"(zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(
    r"(bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt", re.ASCII
)  # fmt: skip
_RANKS = re.compile(rb"dp_world_size(?:q.|r.{4})(?:K(?P<one>.)|M(?P<two>..)|J(?P<four>.{4}))", re.DOTALL)
"""The number of data-parallel ranks in a pickle: a key, its memo, and a number of one, two or four bytes."""
_LARGEST = 64 << 20


class Habit:
    """Arguments that this program gives to `save_checkpoint`, from which those for another step are derived."""

    def __init__(self, folder: str, tag: str | None, state: Any, step: int) -> None:
        self.folder, self.step, self.tag = folder, step, tag
        self.state = dict(state or {})

    @property
    def is_known(self) -> bool:
        """Return whether tag and client state depend on nothing but the step."""
        tag = self.tag is None or _number(self.tag) == self.step
        values = self.state.values()
        return self.step > 1 and tag and all(type(value) is int and abs(value - self.step) < 2 for value in values)

    def at(self, step: int) -> tuple[str, str | None, dict[str, int]]:
        """Return the arguments of `save_checkpoint` for another step."""
        ahead = step - self.step
        tag = None if self.tag is None else _LAST_NUMBER.sub(str(step), self.tag)
        return self.folder, tag, {name: value + ahead for name, value in self.state.items()}


def _number(name: str) -> int:
    found = _LAST_NUMBER.search(name)
    return int(found[1][:18]) if found else -1


def install(module: Any, host: AdapterHost) -> None:
    """Hook the engine's steps, saves and loads. `module` is `deepspeed.runtime.engine`."""
    engine, habits = module.DeepSpeedEngine, {}  # type: Any, dict[int, Habit]
    _hook_load(engine, habits, host)
    _hook_save(engine, habits, host)
    _hook_step(engine, habits, host)


def _note_habit(habits: dict[int, Habit], host: AdapterHost, engine: Any, habit: Habit) -> None:
    habits[id(engine)] = habit
    if habit.is_known and len(habits) == 1:  # programs with two engines keep states that belong together
        host.answer_requests()


def _hook_load(engine: Any, habits: dict[int, Habit], host: AdapterHost) -> None:
    load = engine.load_checkpoint
    choose = host.guard(_choose_tag)
    note = host.guard(functools.partial(_note_habit, habits, host))

    @functools.wraps(load)
    def load_checkpoint(self: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        path, state = load(self, load_dir, tag or choose(load_dir), *args, **kwargs)
        if path is not None and host.leads:
            note(self, Habit(os.fspath(load_dir), tag, state, self.global_steps))
        return path, state

    engine.load_checkpoint = load_checkpoint


def _choose_tag(folder: Any) -> str | None:
    """Return the tag of the run's newest complete checkpoint, which `latest` may not name."""
    offered = os.environ.get("ORCH_RESUME_PATH", "")
    is_own = offered and os.path.realpath(os.path.dirname(offered)) == os.path.realpath(os.fspath(folder))
    return os.path.basename(offered) if is_own else None


def _hook_save(engine: Any, habits: dict[int, Habit], host: AdapterHost) -> None:
    save = engine.save_checkpoint
    enter = host.guard(lambda: host.leads and host.rank.enter("checkpoint"))
    leave = host.guard(lambda: host.leads and host.rank.leave("checkpoint"))

    def report(self: Any, folder: Any, tag: Any, state: Any) -> None:
        if host.leads:
            host.lead()
            step, name = self.global_steps, tag or f"global_step{self.global_steps}"
            host.saved(step, os.path.abspath(os.path.join(os.fspath(folder), str(name))))
            _note_habit(habits, host, self, Habit(os.fspath(folder), None if tag is None else str(tag), state, step))

    saved = host.guard(report)

    @functools.wraps(save)
    def save_checkpoint(
        self: Any, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        enter()
        try:
            result = save(self, save_dir, tag, client_state or {}, *args, **kwargs)
        finally:
            leave()
        saved(self, save_dir, tag, client_state)
        return result

    engine.save_checkpoint = save_checkpoint


def _hook_step(engine: Any, habits: dict[int, Habit], host: AdapterHost) -> None:
    step = engine.step

    def after_step(self: Any, before: int) -> None:
        if self.global_steps == before or not host.leads:
            return
        host.lead()
        host.rank.step(number=self.global_steps)
        reason = host.due(self.global_steps) if id(self) in habits else 0
        if reason:
            self.save_checkpoint(*habits[id(self)].at(self.global_steps))
        if reason > SAVE_AND_GO_ON:
            host.leave()

    after = host.guard(after_step)

    @functools.wraps(step)
    def step_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.global_steps
        result = step(self, *args, **kwargs)
        after(self, before)
        return result

    engine.step = step_and_report


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Return folders with a number in their names and DeepSpeed's files, lowest step first. Raises OSError."""
    found = []
    for entry in os.scandir(folder):
        if entry.is_dir() and _number(entry.name) >= 0 and any(map(_is_part, os.listdir(entry.path))):
            found.append((_number(entry.name), entry.path))
    return sorted(found)


def _is_part(name: str) -> bool:
    return bool(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))


def damage(path: str) -> str:
    """Return why a checkpoint is incomplete, or "" if it is complete. Raises OSError."""
    names = sorted(os.listdir(path))
    models = [match for match in map(_MODEL.fullmatch, names) if match]
    optimizers = [match for match in map(_OPTIMIZER.fullmatch, names) if match]
    if not models:
        return "lacks mp_rank_00_model_states.pt"
    ranks = max((_count_ranks(os.path.join(path, match[0])) for match in models), default=0)
    ranks = ranks if _has_files_of_all(ranks, path) else 0
    for matches, needed in ((optimizers, bool(optimizers)), (models, models[0]["data"] is not None)):
        if needed and (missing := _find_missing(matches, ranks)):
            return f"lacks {missing}"
    if not optimizers and models[0]["data"] is not None:
        return "lacks the ranks' optimizer states"
    return ""


def _find_missing(matches: list[re.Match[str]], ranks: int) -> str:
    """Return the first file that is missing among those of all data-parallel and model-parallel ranks."""
    there = {(int(match["data"]), int(match["model"])) for match in matches}
    data = max(ranks, 1 + max(one for one, _ in there))
    model = 1 + max(one for _, one in there)
    wanted = ((one, other) for one in range(data) for other in range(model))
    place = next((place for place in wanted if place not in there), None)
    if place is None:
        return ""
    name = matches[0][0]
    data_at, model_at = matches[0].span("data"), matches[0].span("model")
    return f"{name[: data_at[0]]}{place[0]}{name[data_at[1] : model_at[0]]}{place[1]:02d}{name[model_at[1] :]}"


def _has_files_of_all(ranks: int, path: str) -> bool:
    """Return whether another checkpoint beside this one has an optimizer file of the last rank.

    With MiCS, or with storage that each node has for itself, no checkpoint has the files of all ranks.
    """
    for _, other in checkpoints(os.path.dirname(os.path.abspath(path))):
        matches = map(_OPTIMIZER.fullmatch, os.listdir(other))
        if other != os.path.abspath(path) and any(match and int(match["data"]) == ranks - 1 for match in matches):
            return True
    return False


def _count_ranks(path: str) -> int:
    """Return the number of data-parallel ranks that a model file names, or 0 if it cannot be read.

    Nothing is unpickled: the number is found as bytes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(one for one in archive.namelist() if one.endswith("data.pkl"))
            with archive.open(name) as stream:
                found = _RANKS.search(stream.read(_LARGEST))
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError, EOFError, NotImplementedError, RuntimeError):
        return 0
    return 0 if found is None else int.from_bytes(found["one"] or found["two"] or found["four"], "little")


def resume(path: str) -> tuple[dict[str, str], list[str]]:
    """Return the variable from which `install` takes the tag for `load_checkpoint`."""
    return ({"ORCH_RESUME_PATH": path} if path else {}), []
