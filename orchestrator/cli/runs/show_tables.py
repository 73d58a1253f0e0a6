"""Tables of `orch show`: incidents and restore tests."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.cli.restore_tests import Proven, newest_proven, restore_test_json
from orchestrator.cli.terminal.render import Column, Screen, count, iso, size, span
from orchestrator.registry.records import Checkpoint, CheckpointCopy, Generation, Notice, RestoreTest, Run
from orchestrator.run_dirs.ingest import UNREADABLE_EVENT
from orchestrator.states import Trust
from trainer.protocol.events import EventKind
from trainer.protocol.restore_test import Outcome

Row = dict[str, Any]
Found = dict[str, list[Row]]


def incidents_json(run: Run, notices: Sequence[Notice], generations: Sequence[Generation]) -> Found:
    """Return notices as lists of plain JSON data by kind, oldest first."""
    by_kind: dict[str, list[Notice]] = {}
    for notice in notices:
        by_kind.setdefault(notice.kind, []).append(notice)

    def rows(kind: str, *keys: str) -> list[Row]:
        return [{**_when(item), **{key: item.data.get(key) for key in keys}} for item in by_kind.get(kind, ())]

    return {
        "incidents": [_incident(run, item, generations) for item in by_kind.get(EventKind.INCIDENT, ())],
        "stragglers": rows(
            EventKind.STRAGGLER, "rank", "node", "section", "ratio", "step", "steps", "gpu_hours", "over"
        ),
        "code_recorded": rows(EventKind.CODE_RECORDED, "digest"),
        "code_changes": rows(EventKind.CODE_CHANGED, "digest", "reason", "accepted"),
        "skipped": rows(EventKind.BATCH_SKIPPED, "step", "position", "reason"),
        "restart_differs": rows(EventKind.RESTART_DIFFERS, "step", "restored", "reason"),
        "incomplete": rows(EventKind.CHECKPOINT_INCOMPLETE, "step", "reason"),
        "spares": rows(EventKind.SPARE_USED, "node", "name", "instead", "reason"),
        "unfit": [_unfit(item) for item in by_kind.get(EventKind.PREFLIGHT, ())],
        "unreadable": rows(UNREADABLE_EVENT, "unread", "reason"),
    }


def _unfit(notice: Notice) -> Row:
    """Return the row with the node's name; the event's `node` is an index in the job."""
    return {**_when(notice), "node": notice.data.get("name"), "reason": notice.data.get("reason")}


def _when(notice: Notice) -> Row:
    return {"time": iso(notice.time), "attempt": notice.attempt, "generation": notice.generation}


def _incident(run: Run, notice: Notice, generations: Sequence[Generation]) -> Row:
    told = notice.data
    path = Path(run.run_dir) / told["evidence"] if told.get("evidence") else None
    keys = ("name", "kind", "rank", "node", "phase", "step", "reason", "waiting", "detected")
    return {
        **_when(notice),
        **{key: told.get(key) for key in keys},
        **{key: told[key] for key in ("culprits", "chain") if key in told},
        "withdrawn": bool(told.get("withdrawn")),
        "evidence": str(path) if path is not None else None,
        "evidence_there": path is not None and path.is_dir(),
        "done": _done(notice, generations),
    }


def _done(notice: Notice, generations: Sequence[Generation]) -> str:
    """Return the outcome of an incident: the reason with which its generation ended."""
    if notice.data.get("withdrawn"):
        return "nothing: it went on by itself"
    place = (notice.attempt, notice.generation)
    own = next((item for item in generations if (item.attempt, item.number) == place), None)
    return own.reason if own is not None and own.ended_at is not None else ""


def incident_tables(screen: Screen, found: Found) -> None:
    """Print one table for each kind of notice that occurred."""
    for title, key, columns in TABLES:
        if found[key]:
            screen.say(f"\n{title}")
            screen.table(columns, [_flat(screen, row) for row in found[key]], aligned=True)


def _flat(screen: Screen, row: Row) -> Row:
    """Return the row with combined columns for display."""
    there = row.get("evidence_there")
    folder = "/".join(Path(row["evidence"]).parts[-4:]) if row.get("evidence") else "none"
    culprits = row.get("culprits") or ()
    return {
        **row,
        "ranks": ", ".join(str(one["rank"]) for one in culprits) or row.get("rank"),
        "nodes": ", ".join(dict.fromkeys(one["node"] for one in culprits)) or row.get("node"),
        "at": screen.when(datetime.fromisoformat(row["time"]).timestamp()),
        "place": f"{row['attempt']}.{row['generation']}",
        "done": row.get("done") or row.get("reason"),
        "folder": folder if there or there is None else f"{folder} (gone)",
    }


def _ratio(ratio: Any) -> str:
    return f"{ratio:.2f} x" if isinstance(ratio, (int, float)) else "-"


def _hours(hours: Any) -> str:
    return f"{hours:.3g}" if isinstance(hours, (int, float)) else "-"


def _still(over: Any) -> str:
    return "as fast again" if over else "slow"


def _yes(accepted: Any) -> str:
    return "by resume" if accepted else "no"


_WHEN = Column("WHEN", "at", drop_order=2)
_GENERATION = Column("ATT.GEN", "place")
_RANK = Column("RANK", "rank", right=True)
_NODE = Column("NODE", "node")
_STEP = Column("STEP", "step", count, right=True)
_REASON = Column("WHY", "reason", wraps=True)
_INCIDENTS = [
    _WHEN, _GENERATION, Column("KIND", "kind"), Column("RANK", "ranks", right=True), Column("NODE", "nodes"),
    Column("PHASE", "phase", drop_order=1), _STEP,
    Column("WHAT WAS DONE", "done", wraps=True), Column("EVIDENCE", "folder"),
]  # fmt: skip
_STRAGGLERS = [
    _WHEN, _GENERATION, _RANK, _NODE, Column("SECTION", "section"), Column("WORK", "ratio", _ratio, right=True), _STEP,
    Column("GPU HOURS LOST", "gpu_hours", _hours, right=True), Column("NOW", "over", _still),
]  # fmt: skip
_SKIPPED = [_WHEN, _GENERATION, _STEP, Column("POSITION", "position", count, right=True), _REASON]
_SPARES = [_WHEN, _GENERATION, Column("SPARE", "name"), Column("INSTEAD OF", "instead"), _REASON]
_CODE = [_WHEN, _GENERATION, Column("OTHER CODE TRAINS", "reason", wraps=True), Column("ACCEPTED", "accepted", _yes)]
_UNFIT = [_WHEN, Column("ATT", "attempt", right=True), _NODE, _REASON]
_UNREADABLE = [_WHEN, _GENERATION, Column("EVENT", "unread"), _REASON]
TABLES = (
    ("incidents", "incidents", _INCIDENTS),
    ("stragglers", "stragglers", _STRAGGLERS),
    ("changes of the code", "code_changes", _CODE),
    ("batches left out", "skipped", _SKIPPED),
    ("restarts that trained differently", "restart_differs", [_WHEN, _GENERATION, _STEP, _REASON]),
    ("state that checkpoints lack", "incomplete", [_WHEN, _GENERATION, _STEP, _REASON]),
    ("spare nodes used", "spares", _SPARES),
    ("nodes that failed their checks", "unfit", _UNFIT),
    ("events that cannot be read", "unreadable", _UNREADABLE),
)
"""Title, key in the answer, and columns."""


SHOWN = 5
UNDER_WAY = "under way"


def find_proven_checkpoint(
    tests: Sequence[RestoreTest], checkpoints: Sequence[Checkpoint], copies: Sequence[CheckpointCopy]
) -> Proven | None:
    """Return the newest proven checkpoint that still exists."""
    copied = {copy.name for copy in copies}
    gone = {item.name for item in checkpoints if item.trust is Trust.DELETED and item.name not in copied}
    known = [item for item in checkpoints if item.trust is not Trust.CORRUPT and item.name not in gone]
    return newest_proven(tests, {item.name: item.committed_at for item in known})


def restore_tests_json(tests: Sequence[RestoreTest], proven: Proven | None, own: RestoreTest | None) -> Row:
    """Return tests of a run's checkpoints, newest first, the proven checkpoint, and the test that the run itself is."""
    return {
        "restore_tests": [restore_test_json(test) for test in reversed(tests)],
        "proven": {**asdict(proven), "ended_at": iso(proven.ended_at)} if proven else None,
        "is_restore_test": restore_test_json(own) if own else None,
    }


def say_restore_tests(screen: Screen, run: str, tests: Sequence[RestoreTest], proven: Proven | None) -> None:
    """Print the newest tests of a run's checkpoints and the proven checkpoint."""
    if tests:
        screen.say("\nrestore tests")
        screen.table(TESTS, [_row(test, time.time()) for test in tests[: -SHOWN - 1 : -1]], aligned=True)
    if len(tests) > SHOWN:
        screen.note(f"{len(tests) - SHOWN} more:  orch restore-tests history {run}")
    screen.say(("" if tests else "\n") + _proven_words(tests, proven))


def _proven_words(tests: Sequence[RestoreTest], proven: Proven | None) -> str:
    if proven is not None:
        ago = span(time.time() - proven.ended_at)
        return f"newest proven restorable: step {count(proven.step)}, {ago} ago, on {', '.join(proven.layouts)}"
    if any(test.verdict == Outcome.RESTORED for test in tests):
        return "no checkpoint that is there now, and good, has been restored by a test"
    return "no checkpoint of it has been restored by a test"


def _row(test: RestoreTest, now: float) -> Row:
    found = test.evidence
    return {
        "step": test.step, "layout": test.layout, "verdict": test.verdict or UNDER_WAY, "reason": test.reason,
        "age": now - (test.ended_at or test.begun_at), "rto": found.get("rto_seconds"),
        "rate": found.get("bytes_per_second"), "compared": found.get("compared"),
    }  # fmt: skip


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{size(rate)}/s"


TESTS = [
    Column("STEP", "step", count, right=True),
    Column("LAYOUT", "layout"),
    Column("VERDICT", "verdict"),
    Column("AGE", "age", span, right=True),
    Column("RTO", "rto", span, right=True),
    Column("RATE", "rate", _rate, right=True, drop_order=1),
    Column("COMPARED", "compared", right=True, drop_order=2),
    Column("WHY", "reason"),
]


def own_lines(test: RestoreTest) -> dict[str, str]:
    """Return the head lines of a run that is a restore test."""
    return {
        "tests": f"step {count(test.step)} of {test.run} on {test.layout}   {test.checkpoint}",
        "verdict": f"{test.verdict or UNDER_WAY}" + (f"   {test.reason}" if test.reason else ""),
    }


def compared_table(screen: Screen, test: RestoreTest) -> None:
    """Print the steps that a restore test trained beside the run's own."""
    recorded = test.evidence.get("run_steps") or {}
    rows = [
        _join_recorded_step(step, recorded.get(str(step["step"])) or []) for step in test.evidence.get("steps") or ()
    ]
    if rows:
        screen.say("")
        screen.table(COMPARED, rows, aligned=True)


def _join_recorded_step(step: Mapping[str, Any], recorded: Sequence[Mapping[str, Any]]) -> Row:
    """Return a step beside the run's closest record of it, since the run may have trained it more than once."""
    nearest = min(recorded, key=lambda own: _distance(own.get("loss"), step.get("loss")), default={})
    return {**step, **{f"run_{name}": value for name, value in nearest.items()}}


def _distance(one: Any, other: Any) -> float:
    """Return the distance of two losses. With words (nan, inf) it is 0 if they are equal, otherwise infinity."""
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    found = abs(one - other) if numbers else 0.0 if one == other else float("inf")
    return found if found == found else float("inf")


def _digits(number: Any) -> str:
    return f"{number:.7g}" if isinstance(number, (int, float)) else str("-" if number is None else number)


COMPARED = [
    Column("STEP", "step", count, right=True),
    Column("LOSS", "loss", _digits, right=True),
    Column("RUN'S LOSS", "run_loss", _digits, right=True),
    Column("GRAD NORM", "grad_norm", _digits, right=True),
    Column("RUN'S NORM", "run_grad_norm", _digits, right=True),
    Column("LR", "lr", _digits, right=True, drop_order=1),
    Column("RUN'S LR", "run_lr", _digits, right=True, drop_order=1),
]
