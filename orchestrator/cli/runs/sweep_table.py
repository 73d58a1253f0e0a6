"""The runs of a sweep as one table: varied values, last loss and validation."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import file_size, number
from orchestrator.cli.runs.run_reader import TAIL, parse_steps
from orchestrator.cli.terminal.render import Column, Screen, as_text, decimal, progress, shorten_text, span
from orchestrator.errors import NotFound
from orchestrator.home import registry_path
from orchestrator.near_words import hint_with_choices, nearest
from orchestrator.registry import fast_queries
from orchestrator.run_view import RunView, newest_runs
from trainer.protocol.logs.line_file import read_new_lines
from trainer.protocol.run_dir import RunDir

_VAL_LOSS = "val_loss"


def find_sweep(name: str, states: Iterable[str] | None = None, tags: Iterable[str] = ()) -> list[RunView]:
    """Return the runs of a sweep, oldest first. Raises NotFound with similar names."""
    known = fast_queries.sweep_names(registry_path())
    if name not in known:
        listed = f"sweeps: {', '.join(known[:_SHOWN])}{', ...' if len(known) > _SHOWN else ''}"
        hint = hint_with_choices(nearest(name, known), listed if known else "`orch sweep` starts one")
        raise NotFound(f"no sweep {name}", hint=hint)
    return newest_runs(None, states, tags=tags, sweep=name)[::-1]


_SHOWN = 12


def last_validation(run_dir: Path) -> tuple[str, float] | None:
    """Return the name and value of a run's newest validation: val_loss, or else its first number."""
    try:
        for attempt in reversed(RunDir(run_dir).all_attempts()):
            start = max(0, file_size(attempt.validation) - TAIL)
            for line in reversed(list(parse_steps(read_new_lines(attempt.validation, start)[0]))):
                found = {name: number(value) for name, value in line["metrics"].items()}
                if name := _VAL_LOSS if _VAL_LOSS in found else next(iter(found), ""):
                    return name, found[name]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return None


def show_sweep(screen: Screen, name: str, views: Sequence[RunView]) -> None:
    """Print the table of a sweep, or its runs with `validation` as JSON."""
    results = {view.run: last_validation(Path(view.run_dir)) for view in views}
    if screen.json:
        rows = [{**view.to_json(), "validation": _as_json(results[view.run])} for view in views]
        screen.data("status", rows)
        return
    keys = list(dict.fromkeys(key for view in views for key in view.sweep["point"]))
    columns = [
        Column("RUN", "run"), Column("STATE", "state"), *(Column(key, f"point.{key}", right=True) for key in keys),
        Column("STEP", "progress", right=True), Column("LOSS", "loss", decimal, right=True),
        Column("VALIDATION", "validation", right=True), Column("ETA", "eta_s", span, right=True, drop_order=1),
        Column("WHY", "reason", lambda reason: shorten_text(as_text(reason)), drop_order=2),
    ]  # fmt: skip
    screen.table(columns, [_cells(view, results[view.run]) for view in views])
    states = ", ".join(f"{count} {state}" for state, count in Counter(view.state for view in views).items())
    limit = max(view.sweep["limit"] for view in views) if views else 0
    screen.note(f"sweep {name}: {states}; at most {limit} unfinished at once")


def _as_json(result: tuple[str, float] | None) -> dict[str, float] | None:
    return None if result is None else {result[0]: result[1]}


def _cells(view: RunView, result: tuple[str, float] | None) -> dict[str, Any]:
    name, value = result or ("", None)
    shown = decimal(value)
    return {
        **vars(view), **{f"point.{key}": text for key, text in view.sweep["point"].items()},
        "progress": progress(view.step, view.total_steps), "eta_s": view.eta_s,
        "validation": f"{name} {shown}" if name not in ("", _VAL_LOSS) else shown,
    }  # fmt: skip
