"""`orch compare`: configuration, software, speed, losses and equality of several runs."""

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from checkpointing.storage.durable import dump_line, number, open_regular
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.runs.config_changes import describe_place
from orchestrator.cli.runs.run_reader import StepLine, parse_steps
from orchestrator.cli.runs.tags import check_tags, warn_of_unknown_tags
from orchestrator.cli.runs.training_figures import find_median
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, decimal, progress, span
from orchestrator.config.redaction import redacted_value
from orchestrator.errors import ConfigError
from orchestrator.run_view import RunView, find_run, newest_runs
from orchestrator.states import LIVE_RUNS
from trainer.protocol.run_dir import RunDir

BARS = "▁▂▃▄▅▆▇█"
"""Bar characters from the lowest to the highest loss; `streams` replaces them in encodings that lack them."""
NOT_FINITE = "x"
_OUTLIERS = 0.02
"""Share of the losses that the scale excludes, starting with the highest."""
POINTS = 10
WIDE, NARROW = 60, 24
"""Width of a curve, in characters, on wide and narrow terminals."""
BESIDE = 74
"""Total width of the run table's other columns."""
SOFTWARE = ("code.orch", "code.user", "env.python", "env.torch", "env.driver", "data.fingerprint")
"""Identity fields that may differ between runs with the same configuration."""
COMPARE_JSON = """
{runs: [{run, state, reason, step, total_steps, loss, tokens_per_s, running_s, elapsed_s, attempts, generations, tags,
config_digest, steps, sparkline}], config: [{key, values}], software: [{key, values}], losses: [{step, values}],
equality: {equal, steps, validations, first_difference: {step, what, values} | null}}; values are by run; tokens_per_s
is a median over all steps; equal is null if the runs share no step
"""


@dataclass(frozen=True)
class LossCurve:
    """A run's numbers by step, including NaN and infinities. If a step was trained again, its newest numbers count."""

    losses: Mapping[int, float] = field(default_factory=dict)
    tokens_per_s: float | None = None  # median over all steps
    computed: Mapping[int, str] = field(default_factory=dict)  # all computed numbers, as `_computed_part` returns them
    validations: Mapping[int, str] = field(default_factory=dict)  # likewise


def read_curve(run_dir: Path) -> LossCurve:
    """Read the metrics of a run's attempts. The curve is empty if it has not trained or its folder is not visible."""
    attempts = RunDir(run_dir).all_attempts()
    speeds: list[StepLine] = []
    losses: dict[int, float] = {}
    computed: dict[int, str] = {}
    for line in (line for attempt in attempts for line in _read_lines(attempt.metrics)):
        try:
            losses[line["step"]] = number(line["loss"])
        except (ValueError, KeyError, TypeError):
            continue  # from a version with another format
        computed[line["step"]] = _computed_part(line)
        speeds.append({"tokens_per_s": line.get("tokens_per_s")})
    validations = {line["step"]: _computed_part(line) for each in attempts for line in _read_lines(each.validation)}
    return LossCurve(losses, find_median(speeds, "tokens_per_s"), computed, validations)


def _read_lines(path: Path) -> Iterator[StepLine]:
    try:
        stream = open_regular(path)
    except OSError:
        return
    with stream:
        yield from parse_steps(stream)


def _computed_part(line: StepLine) -> str:
    """Return a line's loss, gradient norm and workload numbers as compact JSON, without times and speeds."""
    return json.dumps([line.get("loss"), line.get("grad_norm"), line.get("metrics")], separators=(",", ":"))


def common_steps(curves: Sequence[LossCurve], most: int) -> list[int]:
    """Return at most `most` evenly spaced steps that all curves share, including the last one."""
    shared = sorted(set.intersection(*(set(curve.losses) for curve in curves))) if curves else []
    if len(shared) <= most:
        return shared
    return [shared[round((index + 1) * len(shared) / most) - 1] for index in range(most)]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The scale shared by all compared curves: steps `first` to `last`, losses `low` to `high`."""

    first: int
    last: int
    low: float
    high: float

    @classmethod
    def from_curves(cls, curves: Sequence[LossCurve]) -> "Scale | None":
        """Return the scale of the curves; None if no run has a finite loss."""
        steps = [step for curve in curves for step in curve.losses]
        finite = sorted(loss for curve in curves for loss in curve.losses.values() if math.isfinite(loss))
        if not finite:
            return None
        high = finite[max(0, math.ceil(len(finite) * (1 - _OUTLIERS)) - 1)]
        return cls(first=min(steps), last=max(steps), low=finite[0], high=high)


def sparkline(curve: LossCurve, scale: Scale | None, width: int) -> str:
    """Draw the curve in at most `width` characters, with blanks for missing steps; empty for a run without losses."""
    if scale is None or not curve.losses:
        return ""
    cells: list[list[float]] = [[] for _ in range(min(width, scale.last - scale.first + 1))]
    for step, loss in curve.losses.items():
        cells[(step - scale.first) * len(cells) // (scale.last - scale.first + 1)].append(loss)
    return "".join(_bar(cell, scale) for cell in cells).rstrip()


def _bar(losses: Sequence[float], scale: Scale) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not losses:
        return " "
    if not finite:
        return NOT_FINITE
    height = (statistics.fmean(finite) - scale.low) / ((scale.high - scale.low) or 1.0)
    return BARS[min(len(BARS) - 1, max(0, int(height * len(BARS))))]


LOSS, GRADIENT_NORM = "loss", "gradient norm"
_METRIC, _VALIDATION = "metric ", "validation "
"""Prefixes for the names of the workload's numbers. `_VALIDATION` sorts after `_METRIC`."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """First number that differs between runs. `values` is in the order of the runs, with None for a missing number."""

    step: int
    what: str
    values: tuple[float | None, ...]

    def __str__(self) -> str:
        *others, last = ("none" if value is None else repr(value) for value in self.values)
        return f"first difference at step {self.step}: {self.what} {', '.join(others)} and {last}"


@dataclass(frozen=True, kw_only=True)
class Equality:
    """Result of a comparison: counts of shared steps and validations, what was compared, the first difference."""

    steps: int
    validations: int
    compared: tuple[str, ...]
    difference: Difference | None

    @property
    def equal(self) -> bool | None:
        """Whether all shared numbers are equal; None without a shared step."""
        return self.difference is None if self.steps else None

    def __str__(self) -> str:
        if self.difference is not None:
            return str(self.difference)
        counts = ((self.steps, "shared step"), (self.validations, "validation"))
        steps, validations = (f"{n} of {n} {what}{'' if n == 1 else 's'}" for n, what in counts)
        text = f"equal bit for bit: {steps} ({', '.join(self.compared)})"
        return text + (f", {validations}" if self.validations else "")


def compare_curves(curves: Sequence[LossCurve]) -> Equality:
    """Compare two or more runs step by step. A step's validation comes after the step itself."""
    steps = set.intersection(*(set(curve.computed) for curve in curves))
    validations = set.intersection(*(set(curve.validations) for curve in curves))
    lines = sorted([*((step, _METRIC) for step in steps), *((step, _VALIDATION) for step in validations)])
    found = (_difference(step, kind, curves) for step, kind in lines)
    with_metrics = any(not curve.computed[step].endswith(",null]") for curve in curves for step in steps)
    return Equality(
        steps=len(steps), validations=len(validations),
        compared=(LOSS, GRADIENT_NORM, *(("metrics",) if with_metrics else ())),
        difference=next((one for one in found if one is not None), None),
    )  # fmt: skip


def _difference(step: int, kind: str, curves: Sequence[LossCurve]) -> Difference | None:
    parts = [(curve.validations if kind == _VALIDATION else curve.computed)[step] for curve in curves]
    if len(set(parts)) == 1:
        return None
    numbers = [_numbers(part, kind) for part in parts]
    for name in dict.fromkeys(name for one in numbers for name in one):
        values = tuple(one.get(name) for one in numbers)
        if len({repr(value) for value in values}) > 1:  # bitwise: NaN equals NaN, and 0.0 differs from -0.0
            return Difference(step=step, what=name, values=values)
    return None


def _numbers(part: str, kind: str) -> dict[str, float | None]:
    loss, grad_norm, metrics = json.loads(part)
    own = {f"{kind}{name}": value for name, value in metrics.items()} if isinstance(metrics, dict) else {}
    found: dict[str, float | None] = {}
    for name, value in {LOSS: loss, GRADIENT_NORM: grad_norm, **own}.items():
        try:
            found[name] = number(value)
        except (KeyError, TypeError, ValueError):
            found[name] = None
    return found


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A compared run. `config` is resolved and flat; times are in seconds."""

    view: RunView
    config: Mapping[str, Any]
    software: Mapping[str, Any]
    curve: LossCurve
    running_s: float
    elapsed_s: float

    @property
    def name(self) -> str:
        return self.view.run


@click.command(cls=Verb, json_data=COMPARE_JSON)
@click.argument("runs", metavar="RUN...", nargs=-1)
@click.option(
    "-t", "--tag", "tags", multiple=True, metavar="NAME",
    help="Also compare the runs with this tag; if repeated, only runs with all of the tags.",
)  # fmt: skip
@click.option(
    "--points", type=click.IntRange(1), metavar="N", default=POINTS, show_default=True,
    help="Number of steps whose losses are listed.",
)  # fmt: skip
@click.pass_obj
def compare(screen: Screen, runs: tuple[str, ...], tags: tuple[str, ...], points: int) -> None:
    """Compare runs: whether they are equal, where they differ, their speeds, and their losses at shared steps.

    It lists the configuration keys and the software that differ, and draws each run's losses on one line, all on the
    same scale. RAN FOR is how long a run's jobs ran, TOTAL the time from its submission to its end.

    `equal bit for bit` covers the loss, gradient norm and `metrics` of all shared steps, and the results of
    `validate`. Otherwise the first difference is printed with all its digits. NaN equals NaN. If a step was trained
    again, its newest line counts. Losses in tables are rounded.
    """
    tags = check_tags(tags)
    warn_of_unknown_tags(screen, tags)
    tagged = newest_runs(None, tests=True, tags=tags)[::-1] if tags else []
    chosen = list({view.run: view for view in [*map(find_run, dict.fromkeys(runs)), *tagged]}.values())
    if len(chosen) < 2:
        what = f"compare takes two or more runs, {f'only {chosen[0].run}' if chosen else 'none'} was found"
        raise ConfigError(what, hint="`orch status -a` lists the runs, with their tags")
    found = [_read(view) for view in chosen]
    curves = [run.curve for run in found]
    steps, equality = common_steps(curves, points), compare_curves(curves)
    config, software = (_differences([getattr(run, part) for run in found]) for part in ("config", "software"))
    if screen.json:
        screen.data("compare", _document(found, config, software, steps, equality))
        return
    labels = _labels(found, screen.width)
    _run_table(screen, found, labels)
    if equality.steps or equality.difference:
        screen.say(f"\n{equality}")
    _difference_table(screen, "configuration", config, labels)
    if software:
        _difference_table(screen, "software and data", software, labels)
    _loss_table(screen, found, steps, labels)


def _read(view: RunView) -> Compared:
    from orchestrator.config.compose import flat  # imports yaml, needed only to read configurations

    with open_store(readonly=True) as store:
        run, attempts = store.run(view.run), store.attempts(view.run)
        config = store.config(run.config_digest)
    now, ended = time.time(), [attempt.ended_at for attempt in attempts if attempt.ended_at is not None]
    return Compared(
        view=view,
        config=flat(config),
        software={key: _software(run.identity, key) for key in SOFTWARE},
        curve=read_curve(Path(run.run_dir)),
        running_s=sum((attempt.ended_at or now) - attempt.started_at for attempt in attempts if attempt.started_at),
        elapsed_s=(now if run.state in LIVE_RUNS else max(ended, default=run.updated_at)) - run.created_at,
    )


def _software(identity: Mapping[str, Any], key: str) -> Any:
    """Return an identity field for a table, with digests and commits abbreviated."""
    part, _, name = key.partition(".")
    value = (identity.get(part) or {}).get(name)
    if key == "code.orch" and isinstance(value, dict):
        return f"{value.get('version')} {str(value.get('sha256'))[:12]}"
    if key == "code.user" and isinstance(value, list):
        files = (identity["code"].get("files") or {}).get("digest")
        return [*map(describe_place, value), *([f"files {files[:12]}"] if files else [])]
    return value[:12] if key == "data.fingerprint" and isinstance(value, str) else value


def _differences(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return all runs' values for each key whose values differ, with None where the key is missing."""
    keys = dict.fromkeys(key for one in values for key in one)
    rows = {key: [one.get(key) for one in values] for key in keys}
    differing = {key: row for key, row in rows.items() if len({dump_line(value) for value in row}) > 1}
    return {key: [redacted_value(key, value) for value in row] for key, row in differing.items()}


_VIEW_KEYS = (
    "run", "state", "reason", "step", "total_steps", "loss", "attempts", "generations", "tags", "config_digest",
)  # fmt: skip


def _document(
    found: Sequence[Compared], config: Mapping[str, Sequence[Any]], software: Mapping[str, Sequence[Any]],
    steps: Sequence[int], equality: Equality,
) -> dict[str, Any]:  # fmt: skip
    names, first = [run.name for run in found], equality.difference
    scale = Scale.from_curves([run.curve for run in found])

    def by_run(row: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(names, row, strict=True))

    return {
        "runs": [
            {
                **{key: getattr(run.view, key) for key in _VIEW_KEYS}, "tokens_per_s": run.curve.tokens_per_s,
                "running_s": run.running_s, "elapsed_s": run.elapsed_s, "steps": len(run.curve.losses),
                "sparkline": sparkline(run.curve, scale, WIDE),
            }
            for run in found
        ],
        "config": [{"key": key, "values": by_run(row)} for key, row in config.items()],
        "software": [{"key": key, "values": by_run(row)} for key, row in software.items()],
        "losses": [{"step": step, "values": by_run([run.curve.losses[step] for run in found])} for step in steps],
        "equality": {
            "equal": equality.equal, "steps": equality.steps, "validations": equality.validations,
            "first_difference": first and {"step": first.step, "what": first.what, "values": by_run(first.values)},
        },
    }  # fmt: skip


def _labels(found: Sequence[Compared], width: int) -> list[str]:
    """Return the column titles of the runs: their names if they fit, otherwise numbers."""
    names = [run.name for run in found]
    room = min((width - 32) / len(found) - 2, width - BESIDE)
    return names if max(map(len, names)) <= room else [f"#{index}" for index in range(1, len(found) + 1)]


def _run_table(screen: Screen, found: Sequence[Compared], labels: Sequence[str]) -> None:
    scale = Scale.from_curves([run.curve for run in found])
    width = WIDE if screen.width > 140 else NARROW
    rows = [
        {
            **vars(run.view), "label": label, "progress": progress(run.view.step, run.view.total_steps),
            "tries": f"{run.view.attempts}.{run.view.generations}", "speed": run.curve.tokens_per_s,
            "running": run.running_s, "elapsed": run.elapsed_s, "curve": sparkline(run.curve, scale, width),
        }
        for run, label in zip(found, labels, strict=True)
    ]  # fmt: skip
    for run, label in zip(found, labels, strict=True):
        if label != run.name:
            screen.say(f"{label:<3} {run.name}")
    if labels[0] != found[0].name:
        screen.say("")
    screen.table(RUNS, rows, aligned=True)


RUNS = [
    Column("RUN", "label"),
    Column("STATE", "state"),
    Column("STEP", "progress", right=True),
    Column("LOSS", "loss", decimal, right=True),
    Column("TOKENS/S", "speed", lambda speed: "-" if speed is None else count(round(speed)), right=True),
    Column("RAN FOR", "running", span, right=True, drop_order=1),
    Column("TOTAL", "elapsed", span, right=True, drop_order=3),
    Column("ATT.GEN", "tries", right=True, drop_order=2),
    Column("TAGS", "tags", ", ".join, drop_order=4),
    Column("LOSS BY STEP", "curve"),
]


def _difference_table(
    screen: Screen, what: str, differences: Mapping[str, Sequence[Any]], labels: Sequence[str]
) -> None:
    screen.say(f"\n{what}" if differences else f"\n{what}: the same")

    def show(value: Any) -> str:
        return "-" if value is None else value if isinstance(value, str) and value else dump_line(value)

    columns = [Column("KEY", "key"), *(Column(label, label, show, wraps=True) for label in labels)]
    rows = [{"key": key, **dict(zip(labels, values, strict=True))} for key, values in differences.items()]
    screen.table(columns, rows, aligned=True)


def _loss_table(screen: Screen, found: Sequence[Compared], steps: Sequence[int], labels: Sequence[str]) -> None:
    if not steps:
        is_command = any(run.config.get("command") for run in found)
        why = "orch records no losses by step for a `command`" if is_command else "the runs share no trained step"
        screen.say(f"\n{why}")
        return
    columns = [
        Column("STEP", "step", count, right=True),
        *(Column(label, label, decimal, right=True) for label in labels),
    ]
    rows = [
        {"step": step, **{label: run.curve.losses[step] for run, label in zip(found, labels, strict=True)}}
        for step in steps
    ]
    if len(found) == 2:
        columns.append(Column("DIFFERENCE", "apart", lambda value: f"{value:+.4g}" if value else "0", right=True))
        rows = [{**row, "apart": row[labels[1]] - row[labels[0]]} for row in rows]
    screen.say("\nlosses at shared steps")
    screen.table(columns, rows, aligned=True)
