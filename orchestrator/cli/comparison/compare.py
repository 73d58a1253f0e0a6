"""`orch compare`: configuration, software, speed and losses of several runs."""

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from checkpointing.storage.durable import dump_line, number
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.comparison.equality import (
    Computed,
    Equality,
    compare_computed,
    computed_part,
    metrics_lines,
    read_validations,
)
from orchestrator.cli.runs.status import one_row, rows_with_tags
from orchestrator.cli.runs.tags import unknown_tags
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, decimal, progress, span
from orchestrator.config.redaction import redacted_value
from orchestrator.errors import ConfigError
from orchestrator.home import registry_path
from orchestrator.registry.records import Attempt, Run
from orchestrator.states import LIVE_RUNS
from trainer.protocol.run_dir import RunDir

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=*#%@"
"""Characters from the lowest to the highest loss; the second set for terminals that cannot show the first."""
NOT_FINITE = "x"
_OUTLIERS = 0.02
"""Share of the highest losses that are excluded from the scale."""


@dataclass(frozen=True)
class LossCurve:
    """Loss by step, including NaN and infinities; for a step that was trained again, the newest value."""

    losses: Mapping[int, float] = field(default_factory=dict)
    tokens_per_s: float | None = None  # median over all steps
    computed: Mapping[int, str] = field(default_factory=dict)  # all computed numbers, by `computed_part`

    @classmethod
    def read(cls, run_dir: Path) -> "LossCurve":
        """Read the metrics of a run's attempts; empty if it has not trained or its folder is not visible."""
        losses: dict[int, float] = {}
        speeds: list[float] = []
        computed: dict[int, str] = {}
        for attempt in RunDir(run_dir).all_attempts():
            _read_into(attempt.metrics, losses, speeds, computed)
        return cls(losses, statistics.median(speeds) if speeds else None, computed)


def _read_into(path: Path, losses: dict[int, float], speeds: list[float], computed: dict[int, str]) -> None:
    for step, fields in metrics_lines(path):
        try:
            losses[step] = number(fields["loss"])
        except (ValueError, KeyError, TypeError):
            continue  # written by a version with another format
        computed[step] = computed_part(fields)
        if isinstance(speed := fields.get("tokens_per_s"), (int, float)):
            speeds.append(speed)


def common_steps(curves: Sequence[LossCurve], most: int) -> list[int]:
    """Return at most `most` steps that all curves have, evenly spaced, including the last one."""
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


def sparkline(curve: LossCurve, scale: Scale | None, width: int, bars: str = BARS) -> str:
    """Draw the curve in at most `width` characters, with blanks for missing steps; empty for a run without losses."""
    if scale is None or not curve.losses:
        return ""
    cells: list[list[float]] = [[] for _ in range(min(width, scale.last - scale.first + 1))]
    for step, loss in curve.losses.items():
        cells[(step - scale.first) * len(cells) // (scale.last - scale.first + 1)].append(loss)
    return "".join(_bar(cell, scale, bars) for cell in cells).rstrip()


def _bar(losses: Sequence[float], scale: Scale, bars: str) -> str:
    """Return the mean of a few steps as one character."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not losses:
        return " "
    if not finite:
        return NOT_FINITE
    height = (statistics.fmean(finite) - scale.low) / ((scale.high - scale.low) or 1.0)
    return bars[min(len(bars) - 1, max(0, int(height * len(bars))))]


POINTS = 10
WIDE, NARROW = 60, 24
"""Width of a curve in characters, on wide and on narrow terminals."""
BESIDE = 74
"""Columns of the run table beside the names."""
SOFTWARE = ("code.orch", "code.user", "env.python", "env.torch", "env.driver", "data.fingerprint")
"""Identity fields that may differ between runs of one configuration."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A compared run. `config` is resolved and flat; times are in seconds."""

    row: dict[str, Any]  # as in `orch status`
    config: Mapping[str, Any]
    software: Mapping[str, Any]
    curve: LossCurve
    computed: Computed
    running_s: float
    elapsed_s: float

    @property
    def name(self) -> str:
        return str(self.row["run"])


COMPARE_JSON = """
{runs: [{run, state, reason, step, total_steps, loss, tokens_per_s, running_s, elapsed_s, attempts, generations, tags,
config_digest, steps, sparkline}], config: [{key, values}], software: [{key, values}], losses: [{step, values}],
equality: {equal, steps, validations, first_difference: {step, what, values} | null}}; values are by run; tokens_per_s
is a median over all steps; equal is null if the runs share no step
"""


@click.command(cls=Verb, json_data=COMPARE_JSON)
@click.argument("runs", metavar="RUN...", nargs=-1)
@click.option(
    "-t",
    "--tag",
    "tags",
    multiple=True,
    metavar="NAME",
    help="Also runs with this tag (with all of several); repeatable.",
)
@click.option(
    "--points",
    type=click.IntRange(1),
    metavar="N",
    default=POINTS,
    show_default=True,
    help="Steps whose losses to list.",
)
@click.pass_obj
def compare(screen: Screen, runs: tuple[str, ...], tags: tuple[str, ...], points: int) -> None:
    """Compare runs: whether they are equal, where they differ, speed, losses at the steps they share.

    It lists the keys of the configuration and the software that differ, and draws each loss in one line, all on the
    same scale. RAN FOR is the time in which a run's jobs ran, IN ALL the time from its submission to its end.

    `equal bit for bit` covers loss, gradient norm and `metrics` of all shared steps, and the numbers of `validate`.
    Otherwise the first difference is printed with all its digits. NaN equals NaN. If a step was trained again, its
    newest line counts. Losses in tables are rounded.
    """
    tagged = list(reversed(rows_with_tags(tags))) if tags else []
    chosen = list({row["run"]: row for row in [*map(one_row, dict.fromkeys(runs)), *tagged]}.values())
    if len(chosen) < 2:
        raise _too_few([str(row["run"]) for row in chosen], tags, bool(tagged))
    found = [_read(row) for row in chosen]
    steps = common_steps([run.curve for run in found], points)
    equality = compare_computed([run.computed for run in found])
    if screen.json:
        screen.data("compare", {**_document(found, steps), "equality": _equality(found, equality)})
        return
    labels = _labels(found, screen.width)
    _run_table(screen, found, labels)
    if equality.steps or equality.difference:
        screen.say(f"\n{equality}")
    _difference_table(screen, "configuration", _differences([run.config for run in found]), labels)
    software = _differences([run.software for run in found])
    if software:
        _difference_table(screen, "software and data", software, labels)
    _loss_table(screen, found, steps, labels)


def _too_few(names: Sequence[str], tags: Sequence[str], tagged: bool) -> ConfigError:
    """Return the error for fewer than two runs, with a command that works. `tagged`: a run has all of the tags."""
    pair, listed = _pair(names), ", ".join(f"`orch status -t {tag}`" for tag in dict.fromkeys(tags))
    having = f"all of the tags {', '.join(tags)}" if len(tags) > 1 else f"the tag {', '.join(tags)}"
    if unknown := unknown_tags(tags):
        return ConfigError(unknown[0][0], hint=f"{unknown[0][1]}  {pair}")
    if tags and not tagged:
        return ConfigError(f"no run has {having}", hint=f"{pair}, {listed}")
    if tags:
        return ConfigError(f"compare takes two or more runs, only {names[0]} has {having}", hint=f"{pair}, {listed}")
    said = f"only {names[0]} is named" if names else "no run is named"
    return ConfigError(f"compare takes two or more runs, {said}", hint=pair)


def _pair(names: Sequence[str]) -> str:
    """Return a command that compares the named run with the newest of the others."""
    from orchestrator.registry import fast_queries

    others = [row["run"] for row in fast_queries.newest(registry_path(), 2 + len(names)) if row["run"] not in names]
    chosen = [*reversed(others[: 2 - len(names)]), *names][:2]
    return f"`orch compare {' '.join(chosen)}`" if len(chosen) == 2 else "there is no other run: `orch status -a`"


def _read(row: dict[str, Any]) -> Compared:
    from orchestrator.config.compose import flat  # yaml: only where configurations are read

    with open_store(readonly=True) as store:
        run, attempts = store.run(row["run"]), store.attempts(row["run"])
        config = store.config(run.config_digest)
    now, folder = time.time(), Path(run.run_dir)
    curve = LossCurve.read(folder)
    return Compared(
        row=row,
        config=flat(config),
        software={key: _software(run.identity, key) for key in SOFTWARE},
        curve=curve,
        computed=Computed(steps=curve.computed, validations=read_validations(folder)),
        running_s=sum((attempt.ended_at or now) - attempt.started_at for attempt in attempts if attempt.started_at),
        elapsed_s=_end(run, attempts, now) - run.created_at,
    )


def _end(run: Run, attempts: Sequence[Attempt], now: float) -> float:
    """Return the time at which the run ended, or `now` for a live run."""
    ended = [attempt.ended_at for attempt in attempts if attempt.ended_at is not None]
    return now if run.state in LIVE_RUNS else max(ended, default=run.updated_at)


def _software(identity: Mapping[str, Any], key: str) -> Any:
    """Return an identity field for a table, with digests and commits abbreviated."""
    part, _, name = key.partition(".")
    value = (identity.get(part) or {}).get(name)
    if key == "code.orch" and isinstance(value, dict):
        return f"{value.get('version')} {str(value.get('sha256'))[:12]}"
    if key == "code.user" and isinstance(value, list):
        files = (identity["code"].get("files") or {}).get("digest")
        return [*map(_place, value), *([f"files {files[:12]}"] if files else [])]
    return value[:12] if key == "data.fingerprint" and isinstance(value, str) else value


def _place(place: Mapping[str, Any]) -> str:
    changed = str(place.get("diff_sha256") or "")[:8] if place.get("dirty") else ""
    known = f" {str(place['git'])[:12]}" if place.get("git") else ""
    return f"{place.get('path')}{known}" + (f" with changes {changed}" if changed else "")


def _differences(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all runs for each key in which they differ; None for a missing key."""
    keys = dict.fromkeys(key for one in values for key in one)
    rows = {key: [one.get(key) for one in values] for key in keys}
    differing = {key: row for key, row in rows.items() if len({dump_line(value) for value in row}) > 1}
    return {key: [redacted_value(key, value) for value in row] for key, row in differing.items()}


def _document(found: Sequence[Compared], steps: Sequence[int]) -> dict[str, Any]:
    names, scale = [run.name for run in found], Scale.from_curves([run.curve for run in found])

    def by_run(rows: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        return [{"key": key, "values": dict(zip(names, row, strict=True))} for key, row in rows.items()]

    return {
        "runs": [
            {
                **{key: run.row[key] for key in ("run", "state", "reason", "step", "total_steps", "loss")},
                "tokens_per_s": run.curve.tokens_per_s, "running_s": run.running_s, "elapsed_s": run.elapsed_s,
                "attempts": run.row["attempts"], "generations": run.row["generations"], "tags": run.row["tags"],
                "config_digest": run.row["config_digest"], "steps": len(run.curve.losses),
                "sparkline": sparkline(run.curve, scale, WIDE),
            }
            for run in found
        ],
        "config": by_run(_differences([run.config for run in found])),
        "software": by_run(_differences([run.software for run in found])),
        "losses": [{"step": step, "values": {run.name: run.curve.losses[step] for run in found}} for step in steps],
    }  # fmt: skip


def _equality(found: Sequence[Compared], equality: Equality) -> dict[str, Any]:
    first = equality.difference
    values = dict(zip([run.name for run in found], first.values, strict=True)) if first is not None else {}
    return {
        "equal": equality.equal, "steps": equality.steps, "validations": equality.validations,
        "first_difference": {"step": first.step, "what": first.what, "values": values} if first is not None else None,
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
            **run.row,
            "label": label,
            "progress": progress(run.row["step"], run.row["total_steps"]),
            "tries": f"{run.row['attempts']}.{run.row['generations']}",
            "speed": run.curve.tokens_per_s,
            "running": run.running_s,
            "elapsed": run.elapsed_s,
            "curve": sparkline(run.curve, scale, width, _bars()),
        }
        for run, label in zip(found, labels, strict=True)
    ]
    for run, label in zip(found, labels, strict=True):
        if label != run.name:
            screen.say(f"{label:<3} {run.name}")
    if labels[0] != found[0].name:
        screen.say("")
    screen.table(RUNS, rows, aligned=True)


def _bars() -> str:
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN_BARS
    return BARS


RUNS = [
    Column("RUN", "label"),
    Column("STATE", "state"),
    Column("STEP", "progress", right=True),
    Column("LOSS", "loss", decimal, right=True),
    Column("TOKENS/S", "speed", lambda speed: "-" if speed is None else count(round(speed)), right=True),
    Column("RAN FOR", "running", span, right=True, drop_order=1),
    Column("IN ALL", "elapsed", span, right=True, drop_order=3),
    Column("ATT.GEN", "tries", right=True, drop_order=2),
    Column("TAGS", "tags", ", ".join, drop_order=4),
    Column("LOSS BY STEP", "curve"),
]


def _difference_table(
    screen: Screen, what: str, differences: Mapping[str, Sequence[Any]], labels: Sequence[str]
) -> None:
    if not differences:
        screen.say(f"\n{what}: the same")
        return
    screen.say(f"\n{what}")
    columns = [Column("KEY", "key"), *(Column(label, label, wraps=True) for label in labels)]
    shown = [[_format_value(value) for value in row] for row in differences.values()]
    rows = [{"key": key, **dict(zip(labels, row, strict=True))} for key, row in zip(differences, shown, strict=True)]
    screen.table(columns, rows, aligned=True)


def _format_value(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) and value else dump_line(value)


def _loss_table(screen: Screen, found: Sequence[Compared], steps: Sequence[int], labels: Sequence[str]) -> None:
    if not steps:
        screen.say(f"\n{_describe_progress(found, labels) or 'no step was trained by all of them'}")
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
        columns.append(Column("DIFFERENCE", "apart", _format_difference, right=True))
        rows = [{**row, "apart": row[labels[1]] - row[labels[0]]} for row in rows]
    screen.say(f"\nloss at {'the step' if len(steps) == 1 else 'steps'} that all of them trained")
    screen.table(columns, rows, aligned=True)


def _describe_progress(found: Sequence[Compared], labels: Sequence[str]) -> str:
    """Describe the progress that commands report, for lack of losses by step; empty if every run is a workload's."""
    if not any(run.config.get("command") for run in found):
        return ""
    stands = [
        f"{label} at step {progress(run.row['step'], run.row['total_steps'], ' of ')}, loss {decimal(run.row['loss'])}"
        if run.row["step"]
        else f"{label} reports no step: `progress.pattern` finds it in its log"
        for run, label in zip(found, labels, strict=True)
    ]
    return f"orch records no losses by step for a `command`, only its progress: {'; '.join(stands)}"


def _format_difference(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:+.4g}"
