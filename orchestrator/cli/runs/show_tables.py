"""Tables of `orch show`: incidents and restore tests."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.cli.restore_tests import Proven, newest_proven, restore_test_json, show_tests
from orchestrator.cli.terminal.render import Column, Screen, count, iso, span
from orchestrator.registry.records import Checkpoint, CheckpointCopy, Generation, Notice, RestoreTest, Run
from orchestrator.run_dirs.ingest import UNREADABLE_EVENT
from orchestrator.states import Trust
from trainer.protocol.events import EventKind
from trainer.protocol.restore_test import Outcome

Row = dict[str, Any]
Rows = dict[str, list[Row]]


def incidents_json(run: Run, notices: Sequence[Notice], generations: Sequence[Generation]) -> Rows:
    """Return lists of notices as plain JSON data, keyed by kind, oldest first."""
    found = {"incidents": [_incident(run, item, generations) for item in notices if item.kind == EventKind.INCIDENT]}
    for key, (kind, fields, *_) in NOTICES.items():
        found[key] = [{**_when(item), **_fields(item, *fields)} for item in notices if item.kind == kind]
    for row in found["unfit"]:  # this event's `node` is an index in the job
        row["node"] = row.pop("name")
    return found


def _fields(notice: Notice, *keys: str) -> Row:
    return {key: notice.data.get(key) for key in keys}


def _when(notice: Notice) -> Row:
    return {"time": iso(notice.time), "attempt": notice.attempt, "generation": notice.generation}


def _incident(run: Run, notice: Notice, generations: Sequence[Generation]) -> Row:
    data = notice.data
    path = Path(run.run_dir) / data["evidence"] if data.get("evidence") else None
    return {
        **_when(notice),
        **_fields(notice, "name", "kind", "rank", "node", "phase", "step", "reason", "waiting", "detected"),
        **{key: data[key] for key in ("culprits", "chain") if key in data},
        "withdrawn": bool(data.get("withdrawn")),
        "observed": bool(data.get("observed")),
        "evidence": str(path) if path is not None else None,
        "evidence_there": path is not None and path.is_dir(),
        "done": _outcome(notice, generations),
    }


def _outcome(notice: Notice, generations: Sequence[Generation]) -> str:
    """Return an incident's outcome: why its generation ended."""
    if notice.data.get("withdrawn"):
        return "nothing: it recovered without help"
    if notice.data.get("observed"):
        return "nothing: watch.action=observe"
    place = (notice.attempt, notice.generation)
    ended = (item.reason for item in generations if (item.attempt, item.number) == place and item.ended_at is not None)
    return next(ended, "")


def incident_tables(screen: Screen, found: Rows) -> None:
    """Print one table for each kind of notice that occurred."""
    notices = [(key, title, columns) for key, (_, _, title, columns) in NOTICES.items()]
    for key, title, columns in [("incidents", "incidents", INCIDENTS), *notices]:
        if found[key] and title:
            screen.say(f"\n{title}")
            screen.table(columns, [_cells(screen, row) for row in found[key]], aligned=True)


def _cells(screen: Screen, row: Row) -> Row:
    folder = "/".join(Path(row["evidence"]).parts[-4:]) if row.get("evidence") else "none"
    culprits = row.get("culprits") or ()
    return {
        **row,
        "ranks": ", ".join(str(one["rank"]) for one in culprits) or row.get("rank"),
        "nodes": ", ".join(dict.fromkeys(one["node"] for one in culprits)) or row.get("node"),
        "at": screen.when(datetime.fromisoformat(row["time"]).timestamp()),
        "place": f"{row['attempt']}.{row['generation']}",
        "done": row.get("done") or row.get("reason"),
        "folder": folder if row.get("evidence_there", True) else f"{folder} (gone)",
    }


def _format(pattern: str) -> Any:
    """Return a column format for numbers that leaves words such as nan unchanged."""
    return lambda value: pattern.format(value) if isinstance(value, (int, float)) else value or "-"


_WHEN = Column("WHEN", "at", drop_order=2)
_GENERATION = Column("ATT.GEN", "place")
_RANK = Column("RANK", "rank", right=True)
_NODE = Column("NODE", "node")
_STEP = Column("STEP", "step", count, right=True)
_REASON = Column("WHY", "reason", wraps=True)
INCIDENTS = [
    _WHEN, _GENERATION, Column("KIND", "kind"), Column("RANK", "ranks", right=True), Column("NODE", "nodes"),
    Column("PHASE", "phase", drop_order=1), _STEP, Column("OUTCOME", "done", wraps=True), Column("EVIDENCE", "folder"),
]  # fmt: skip
NOTICES: dict[str, tuple[str, tuple[str, ...], str, list[Column]]] = {
    "stragglers": (
        EventKind.STRAGGLER, ("rank", "node", "section", "ratio", "step", "steps", "gpu_hours", "over"), "stragglers", [
            _WHEN, _GENERATION, _RANK, _NODE, Column("SECTION", "section"),
            Column("WORK", "ratio", _format("{:.2f} x"), right=True), _STEP,
            Column("GPU HOURS LOST", "gpu_hours", _format("{:.3g}"), right=True),
            Column("NOW", "over", lambda over: "recovered" if over else "slow"),
        ],
    ),
    "code_recorded": (EventKind.CODE_RECORDED, ("digest",), "", []),
    "code_changes": (EventKind.CODE_CHANGED, ("digest", "reason", "accepted"), "code changes", [
        _WHEN, _GENERATION, Column("CHANGE", "reason", wraps=True),
        Column("ACCEPTED", "accepted", lambda accepted: "by resume" if accepted else "no"),
    ]),
    "skipped": (EventKind.BATCH_SKIPPED, ("step", "position", "reason"), "skipped batches", [
        _WHEN, _GENERATION, _STEP, Column("POSITION", "position", count, right=True), _REASON,
    ]),
    "restart_differs": (
        EventKind.RESTART_DIFFERS, ("step", "restored", "reason"), "restarts that trained differently",
        [_WHEN, _GENERATION, _STEP, _REASON],
    ),
    "incomplete": (
        EventKind.CHECKPOINT_INCOMPLETE, ("step", "reason"), "state missing from checkpoints",
        [_WHEN, _GENERATION, _STEP, _REASON],
    ),
    "spares": (EventKind.SPARE_USED, ("node", "name", "instead", "reason"), "spare nodes used", [
        _WHEN, _GENERATION, Column("SPARE", "name"), Column("INSTEAD OF", "instead"), _REASON,
    ]),
    "unfit": (EventKind.PREFLIGHT, ("name", "reason"), "nodes that failed their checks", [
        _WHEN, Column("ATT", "attempt", right=True), _NODE, _REASON,
    ]),
    "unreadable": (UNREADABLE_EVENT, ("unread", "reason"), "unreadable events", [
        _WHEN, _GENERATION, Column("EVENT", "unread"), _REASON,
    ]),
}  # fmt: skip
"""The notice kind, its fields, the table's title and its columns, keyed by name in the JSON answer."""
NEWEST = 5
"""Number of restore tests that `orch show` prints."""


def find_proven_checkpoint(
    tests: Sequence[RestoreTest], checkpoints: Sequence[Checkpoint], copies: Sequence[CheckpointCopy]
) -> Proven | None:
    """Return the newest proven checkpoint that still exists."""
    copied = {copy.name for copy in copies}
    gone = {item.name for item in checkpoints if item.trust is Trust.DELETED and item.name not in copied}
    known = [item for item in checkpoints if item.trust is not Trust.CORRUPT and item.name not in gone]
    return newest_proven(tests, {item.name: item.committed_at for item in known})


def restore_tests_json(tests: Sequence[RestoreTest], proven: Proven | None, own: RestoreTest | None) -> Row:
    """Return the tests of a run's checkpoints (newest first), the proven checkpoint, and the run's own test, if any."""
    return {
        "restore_tests": [restore_test_json(test) for test in reversed(tests)],
        "proven": {**asdict(proven), "ended_at": iso(proven.ended_at)} if proven else None,
        "is_restore_test": restore_test_json(own) if own else None,
    }


def say_restore_tests(screen: Screen, run: str, tests: Sequence[RestoreTest], proven: Proven | None) -> None:
    """Print the newest tests of a run's checkpoints and the proven checkpoint."""
    now = time.time()
    if tests:
        screen.say("\nrestore tests")
        show_tests(screen, tests[: -NEWEST - 1 : -1], of_one_run=True)
    if len(tests) > NEWEST:
        screen.note(f"{len(tests) - NEWEST} more:  orch restore-tests history {run}")
    words = "no test has restored a checkpoint of this run"
    if proven is not None:
        words = f"newest proven restorable: step {count(proven.step)}, {span(now - proven.ended_at)} ago, "
        words += f"on {', '.join(proven.layouts)}"
    elif any(test.verdict == Outcome.RESTORED for test in tests):
        words = "no test has restored a checkpoint that still exists and is good"
    screen.say(("" if tests else "\n") + words)


def describe_own_test(test: RestoreTest) -> dict[str, str]:
    """Return the header lines for a run that is a restore test."""
    return {
        "tests": f"step {count(test.step)} of {test.run} on {test.layout}   {test.checkpoint}",
        "verdict": (test.verdict or "under way") + (f"   {test.reason}" if test.reason else ""),
    }


def compared_table(screen: Screen, test: RestoreTest) -> None:
    """Print the steps of a restore test next to the run's own."""
    recorded = test.evidence.get("run_steps") or {}
    steps = test.evidence.get("steps") or ()
    rows = [_join_recorded_step(step, recorded.get(str(step["step"])) or []) for step in steps]
    if rows:
        screen.say("")
        screen.table(COMPARED, rows, aligned=True)


def _join_recorded_step(step: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]) -> Row:
    """Return a step joined with the run's record of it, or with the one whose loss is closest if there are several."""
    nearest = min(recorded, key=lambda own: _distance(own.get("loss"), step.get("loss")), default={})
    return {**step, **{f"run_{name}": value for name, value in nearest.items()}}


def _distance(one: Any, other: Any) -> float:
    """Return the distance between two losses. If one is a word (nan, inf), it is 0 if both are equal, else infinity."""
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    found = abs(one - other) if numbers else 0.0 if one == other else float("inf")
    return found if found == found else float("inf")


_DIGITS = _format("{:.7g}")
COMPARED = [
    Column("STEP", "step", count, right=True),
    Column("LOSS", "loss", _DIGITS, right=True),
    Column("RUN'S LOSS", "run_loss", _DIGITS, right=True),
    Column("GRAD NORM", "grad_norm", _DIGITS, right=True),
    Column("RUN'S NORM", "run_grad_norm", _DIGITS, right=True),
    Column("LR", "lr", _DIGITS, right=True, drop_order=1),
    Column("RUN'S LR", "run_lr", _DIGITS, right=True, drop_order=1),
]
