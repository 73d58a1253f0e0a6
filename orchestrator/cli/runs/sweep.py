"""`orch sweep`: one run for each combination of values, at most a few of them at once."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.slurm_environment import compare_with_controller
from orchestrator.cli.config import OVERRIDES, SOURCE, compose_config, warn_about_config
from orchestrator.cli.runs.submit import check, record, start_controller
from orchestrator.cli.runs.tags import check_tags
from orchestrator.cli.terminal.argument_types import ClusterKind
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen
from orchestrator.errors import ConfigError, NotFound, Precondition
from orchestrator.registry.records import Run, SweepMember

if TYPE_CHECKING:
    from orchestrator.submission.sweep_points import Point
    from trainer.protocol.user_code.code_record import CodeRecord

UNCHECKED = ("name", "optimizer.", "train.seed")
"""Keys that affect no check before the submission, so that runs that differ only in them are checked once."""
SWEEP_JSON = "{sweep, limit, runs: [{run, point, created}]}; created is false for a run that existed"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A point with its configuration, and its run if it exists already."""

    point: "Point"
    composed: Any
    existing: Run | None = None


@click.command(cls=Verb, json_data=SWEEP_JSON)
@SOURCE
@OVERRIDES
@click.option(
    "-p", "--param", "axes", multiple=True, required=True, metavar="KEY=VALUES",
    help="Values of a key: a list (`1e-4,3e-4`), whole numbers (`1:5` is 1 to 5), or with --random an interval "
    "(`0.1:0.3`, `log:1e-5:1e-3`); repeatable.",
)  # fmt: skip
@click.option(
    "--max", "limit", type=click.IntRange(1), default=4, show_default=True, metavar="N",
    help="How many unfinished runs there may be at once.",
)  # fmt: skip
@click.option("--random", "draws", type=click.IntRange(1), metavar="N", help="Draw N points instead of the whole grid.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of --random.")
@click.option("-n", "--name", help="Name of the sweep and its runs; default: the configuration's.")
@click.option("-t", "--tag", "tags", multiple=True, metavar="NAME", help="Tag the runs; repeatable.")
@click.option("--cluster", type=ClusterKind(), help="Where to run; overrides cluster.kind.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the points; submit nothing.")
@click.pass_obj
def sweep(
    screen: Screen, source: str, overrides: tuple[str, ...], axes: tuple[str, ...], limit: int, draws: int | None,
    seed: int, name: str | None, tags: tuple[str, ...], cluster: str | None, dry_run: bool,
) -> None:  # fmt: skip
    """Submit a run for each combination of values; the controller starts at most --max of them at once.

    `orch sweep tiny-gpt -p optimizer.lr=1e-3,3e-3 -p train.seed=1:3 --max 2`. Every configuration is checked before
    the first run is recorded. The runs are ordinary ones: each is restarted until it has finished, and the next one
    starts when one ends. A run that you resume does not wait for the others.

    The same command again submits only what is missing, changes --max, and never repeats a point. `orch status
    --sweep NAME` lists the runs with their values, `orch cancel --sweep NAME` stops them.
    """
    from orchestrator.scheduler.available_schedulers import resolve
    from orchestrator.submission.sweep_points import parse_axis, points

    screen.if_interrupted = lambda: "interrupted: no run was created"
    tags, parsed = check_tags(tags), [parse_axis(text) for text in axes]
    _refuse_fixed([axis.key for axis in parsed], overrides)
    if cluster is not None:
        overrides = (*overrides, f"cluster.kind={cluster}")
    if name is not None:
        overrides = (*overrides, f"name={json.dumps(name, ensure_ascii=False)}")
    planned = [_plan(source, overrides, point) for point in points(parsed, draws, seed)]
    name = str(planned[0].composed.config.name)
    planned = _with_existing(name, planned)
    missing = [item for item in planned if item.existing is None]
    warn_about_config(screen, planned[0].composed.config)
    kind = resolve(planned[0].composed.config.cluster.kind)
    codes = _check_each(screen, missing, kind)
    if dry_run:
        _show(screen, name, limit, planned, [])
        screen.note(f"nothing was submitted; {len(missing)} of {len(planned)} runs are new")
        return
    compare_with_controller(screen, kind)
    again = shlex.join(["orch", "sweep", source, *overrides, *(f"-p{text}" for text in axes)])
    created = _record_each(screen, name, limit, missing, codes, tags, cluster, again)
    if len(missing) < len(planned):
        with open_store() as store:
            store.set_sweep_limit(name, limit)
    start_controller(next(run for run in (*created, *(item.existing for item in planned)) if run is not None))
    _show(screen, name, limit, planned, created)
    screen.note(f"  status   orch status --sweep {name}\n  cancel   orch cancel --sweep {name}")


def _refuse_fixed(keys: Sequence[str], overrides: tuple[str, ...]) -> None:
    fixed = {word.partition("=")[0].lstrip("+~") for word in overrides}
    for key in keys:
        if key.lstrip("+") in fixed:
            hint = f"keep `-p {key}=...`, or the fixed value"
            raise ConfigError(f"{key} is both fixed and varied", where="command line", hint=hint)


def _plan(source: str, overrides: tuple[str, ...], point: "Point") -> PlannedRun:
    """Return the configuration of one point. Raises ConfigError that names the point."""
    from orchestrator.submission import sweep_points

    words = sweep_points.overrides(point)
    try:
        return PlannedRun(point=point, composed=compose_config(source, (*overrides, *words)))
    except ConfigError as error:
        error.where = f"{error.where}, in the point {' '.join(words)}; nothing was submitted"
        raise


def _with_existing(name: str, planned: list[PlannedRun]) -> list[PlannedRun]:
    """Return the plan with the sweep's runs. Raises Precondition if they have another configuration."""
    from orchestrator.submission.sweep_points import base_digest

    try:
        with open_store(readonly=True) as store:
            runs = store.sweep_runs(name)
    except NotFound:  # there is no registry yet
        return planned
    members = [(run, member) for run in runs if (member := SweepMember.from_run(run)) is not None]
    bases = {base_digest(item.composed.data, item.point) for item in planned}
    if any(member.base not in bases for _, member in members):
        what = f"the sweep {name} exists, and its runs differ in more than the varied keys"
        hint = f"-n OTHER starts another sweep; `orch config diff {members[-1][0].name} CONFIG` lists the differences"
        raise Precondition(what, where=f"orch status --sweep {name}", hint=hint)
    return [
        replace(item, existing=next((run for run, member in members if member.point == item.point), None))
        for item in planned
    ]


def _check_each(screen: Screen, missing: list[PlannedRun], kind: str) -> list["CodeRecord | None"]:
    """Check every run, but runs that differ in nothing that the checks read only once; return their code."""
    from orchestrator.config.compose import flat
    from trainer.protocol.config import hash_config

    known: dict[str, CodeRecord | None] = {}
    digests = []
    for item in missing:
        values = flat(item.composed.data)
        digest = hash_config({key: value for key, value in values.items() if not key.startswith(UNCHECKED)})
        if digest not in known:
            known[digest] = check(screen, item.composed, kind)
        digests.append(digest)
    return [known[digest] for digest in digests]


def _record_each(
    screen: Screen, name: str, limit: int, missing: list[PlannedRun], codes: Sequence["CodeRecord | None"],
    tags: tuple[str, ...], cluster: str | None, again: str,
) -> list[Run]:  # fmt: skip
    """Record the missing runs. A kill leaves some of them, and the same command records the rest."""
    from orchestrator.submission.create_run import RunOrigin
    from orchestrator.submission.sweep_points import base_digest

    created: list[Run] = []
    for item, code in zip(missing, codes, strict=True):
        member = SweepMember(
            name=name, limit=limit, point=item.point, base=base_digest(item.composed.data, item.point)
        )  # fmt: skip
        origin = RunOrigin(code=code, tags=tags, sweep=asdict(member))
        created.append(record(screen, item.composed, cluster, origin)[0])
        left = f"{len(created)} of {len(missing)} runs of the sweep {name} are recorded, and they will run"
        screen.if_interrupted = _interrupt_message(f"{left}; the same command records the others: {again}")
    return created


def _interrupt_message(words: str) -> Callable[[], str]:
    return lambda: f"interrupted: {words}"


def _show(screen: Screen, name: str, limit: int, planned: list[PlannedRun], created: list[Run]) -> None:
    runs = {tuple(run.sweep["point"].items()): run.name for run in created}
    rows: list[dict[str, Any]] = [
        {
            "run": item.existing.name if item.existing else runs.get(tuple(item.point.items())),
            "point": item.point, "created": tuple(item.point.items()) in runs,
        }
        for item in planned
    ]  # fmt: skip
    if screen.json:
        screen.data("sweep", {"sweep": name, "limit": limit, "runs": rows})
        return
    keys = list(planned[0].point)
    columns = [Column("RUN", "run"), *(Column(key, key, right=True) for key in keys), Column("", "new")]
    shown = [{**row, **row["point"], "new": "new" if row["created"] else ""} for row in rows]
    screen.table(columns, shown)
