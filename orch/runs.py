"""Submit a run from a script on a login node, inspect it, and wait for it to end."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orch.command_line import ask
from orchestrator.errors import RunCancelled, RunFailed
from orchestrator.states import LIVE_RUNS, RunState

Overrides = Mapping[str, Any] | Sequence[str]
"""`{"train.steps": 200}`, or `["train.steps=200"]` as on the command line."""


@dataclass(frozen=True, kw_only=True)
class LastCheckpoint:
    """The newest checkpoint from which a run could resume."""

    step: int
    trust: str  # COMMITTED, VERIFIED or RESTORED
    age: float  # seconds since it was committed


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as `orch status` reports it; `refresh` queries it again."""

    name: str
    state: str  # CREATED, QUEUED, RUNNING, RECOVERING, SUCCEEDED, FAILED, CANCELLED or HELD
    reason: str
    step: int
    total_steps: int | None
    loss: float | None
    attempts: int  # number of jobs so far
    generations: int  # number of times its ranks were started, over all attempts
    cluster: str  # slurm or local
    job_id: str | None  # of the newest attempt
    nodes: tuple[str, ...]
    last_checkpoint: LastCheckpoint | None
    updated_at: datetime

    def __new__(cls, *names: Any, **_fields: Any) -> "Run":
        """Raise TypeError if given a name, and show the call that finds a run by its name."""
        if names:
            raise TypeError(f"a Run comes from orch.status or orch.submit: orch.status({_name(names[0])!r})[0]")
        return super().__new__(cls)

    @property
    def is_over(self) -> bool:
        """Whether the run has succeeded, failed or been cancelled, or is held until a user acts."""
        return self.state not in LIVE_RUNS

    def refresh(self) -> "Run":
        """Return the run in its current state."""
        return status(self.name)[0]

    def wait(self, timeout: float | None = None) -> "Run":
        """Wait for this run, as `orch.wait` does."""
        return wait(self.name, timeout=timeout)

    def cancel(self) -> None:
        """Request cancellation: the ranks save and stop, and `wait` raises RunCancelled."""
        ask("cancel", self.name)

    def resume(self, overrides: Overrides = ()) -> None:
        """Resume the run, with any overrides that `orch resume` allows."""
        ask("resume", self.name, *_words(overrides))

    def details(self) -> dict[str, Any]:
        """Return the data of `orch show --json`: attempts, checkpoints, configuration, failures."""
        return dict(ask("show", self.name))


def submit(
    config: str | os.PathLike[str] | None = None,
    overrides: Overrides = (),
    *,
    name: str | None = None,
    cluster: str | None = None,
    tags: Iterable[str] = (),
    begin_with: str | None = None,
    weights_only: bool = False,
) -> Run:
    """Submit a run, as `orch submit` does; orch restarts it until it is finished.

    `config` is a preset or a YAML file. `begin_with` is a checkpoint, RUN@STEP; its configuration becomes the
    default. Raises ConfigError, SubmitRejected, SlurmUnreachable, or another OrchError.
    """
    if isinstance(tags, str):
        raise TypeError(f"tags must be a list of strings: [{tags!r}]")
    options = ["--weights-only"] if weights_only else []
    for option, value in (("--name", name), ("--cluster", cluster), ("--from", begin_with)):
        options += [] if value is None else [f"{option}={_text(option, value)}"]
    options += [f"--tag={_text('tags', tag)}" for tag in tags]
    names = [] if config is None else [_text("config", os.fspath(config))]
    return status(ask("submit", *names, *_words(overrides), options=options)["run"])[0]


def status(*runs: str | Run) -> list[Run]:
    """Return these runs, or the newest 50. Raises NotFound."""
    return [_run(row) for row in ask("status", *map(_name, runs))]


def wait(run: str | Run, timeout: float | None = None) -> Run:
    """Wait until the run has succeeded.

    Raises RunFailed if it failed or is held, RunCancelled, or WaitTimeout after `timeout` seconds.
    """
    limit = [] if timeout is None or timeout == math.inf else [f"--timeout={timeout}"]
    ended = _run(ask("wait", _name(run), options=limit, accept=(RunFailed.exit_code, RunCancelled.exit_code)))
    if ended.state == RunState.SUCCEEDED:
        return ended
    kind = RunCancelled if ended.state == RunState.CANCELLED else RunFailed
    raise kind(f"{ended.name} is {ended.state}: {ended.reason}", hint=f"orch show {ended.name}")


def _name(run: str | Run) -> str:
    return run.name if isinstance(run, Run) else _text("run", run)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {value!r}")
    return value


def _words(overrides: Overrides) -> list[str]:
    if isinstance(overrides, str):
        raise TypeError(f"overrides must be a mapping or a list of strings: [{overrides!r}]")
    if isinstance(overrides, Mapping):
        return [f"{key}={_yaml(key, value)}" for key, value in overrides.items()]
    words = [_text("an override", word) for word in overrides]
    if options := [word for word in words if word.startswith("-")]:
        raise ValueError(f"{options[0]} is an option, not an override (KEY=VALUE)")
    return words


def _yaml(key: str, value: Any) -> str:
    """Return a Python value in the configuration's syntax: JSON, except for non-finite numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    try:
        text = json.dumps(value, default=os.fspath, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{key}={value!r} cannot be written into a configuration: {error}") from error
    return _ESCAPE.sub(_join_surrogates, text)


def _join_surrogates(match: re.Match[str]) -> str:
    """Return the YAML escape for a surrogate pair in JSON; ASCII is safe in any locale."""
    return f"\\U{ord(json.loads(chr(34) + match[0] + chr(34))):08x}" if match[1] else match[0]


_ESCAPE = re.compile(r"\\(?:(u)d[89ab]..\\ud[c-f]..|.)")


def _run(row: Mapping[str, Any]) -> Run:
    saved = row["last_checkpoint"]
    checkpoint = saved and LastCheckpoint(step=saved["step"], trust=saved["trust"], age=saved["age_s"])
    fields = ("state", "step", "total_steps", "attempts", "generations", "cluster", "job_id")
    return Run(
        name=row["run"],
        reason=row["reason"] or "",
        loss=None if row["loss"] is None else float(row["loss"]),  # "nan" is not a number in JSON
        nodes=tuple(row["nodes"] or ()),
        last_checkpoint=checkpoint,
        updated_at=datetime.fromisoformat(row["updated_at"]),
        **{key: row[key] for key in fields},
    )
