"""`orch ckpt`: the checkpoints of a run, and whether their bytes still match their digests."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.options import Noun
from orchestrator.cli.registry import open_store
from orchestrator.cli.render import Column, Screen, count, iso, size, span
from orchestrator.errors import CheckpointInvalid, ConfigError, NotFound
from trainer.contract.run_dir import RunDir


@click.group(cls=Noun)
def ckpt() -> None:
    """Checkpoints: list them, verify their bytes."""


@ckpt.command("ls")
@click.argument("run")
@click.option("-a", "--all", "everything", is_flag=True, help="Deleted ones too.")
@click.pass_obj
def ls(screen: Screen, run: str, everything: bool) -> None:
    """Checkpoints of a run, newest first, and how far each is trusted."""
    now = time.time()
    with open_store(readonly=True) as store:
        found = store.run(run)
        known = {row.name: row for row in store.checkpoints(found.name)}
    rows = [_row(row, now) for row in known.values() if everything or row.trust != "DELETED"]
    rows += _unrecorded(RunDir(Path(found.run_dir)), set(known), now)
    rows.sort(key=lambda row: (row["step"], row["attempt"]), reverse=True)
    if screen.json:
        screen.data("ckpt.ls", [{key: row[key] for key in row if key != "age"} for row in rows])
        return
    columns = [
        Column("STEP", "step", count, right=True),
        Column("AGE", "age", span) if screen.terminal else Column("COMMITTED_AT", "committed_at"),
        Column("SIZE", "bytes", size, right=True),
        Column("TRUST", "trust"),
        Column("ATT", "attempt", right=True),
        Column("NAME", "name"),
        Column("WHY", "reason"),
    ]
    screen.table(columns, rows)
    if not rows:
        screen.note(f"{found.name} has no checkpoint yet")


def _row(row: Any, now: float) -> dict[str, Any]:
    return {
        "step": row.step, "trust": str(row.trust), "bytes": row.bytes, "path": row.path, "attempt": row.attempt,
        "name": row.name, "committed_at": iso(row.committed_at), "reason": row.reason, "age": now - row.committed_at,
    }  # fmt: skip


def _unrecorded(place: RunDir, known: set[str], now: float) -> list[dict[str, Any]]:
    """Checkpoints that are on disk and that no controller has read into the registry yet."""
    from checkpointing.catalog import Catalog

    return [
        {
            "step": entry.step, "trust": "COMMITTED", "bytes": entry.bytes, "path": str(entry.path),
            "attempt": entry.attempt, "name": entry.name, "committed_at": iso(entry.committed_at),
            "reason": "not yet in the registry", "age": now - entry.committed_at,
        }
        for entry in Catalog(place.checkpoints).committed()
        if entry.name not in known
    ]  # fmt: skip


@ckpt.command("verify")
@click.argument("target", metavar="RUN[@STEP]")
@click.option(
    "--level",
    type=click.IntRange(0, 2),
    default=2,
    show_default=True,
    help="0: committed, complete, right sizes. 1: a sample of the chunks too. 2: every chunk.",
)
@click.pass_obj
def verify(screen: Screen, target: str, level: int) -> int:
    """Compare a checkpoint's bytes with the digests taken when it was written.

    Without @STEP the newest one; `@all` takes every one. Exit code 7 when any fault is found.
    """
    entries = _chosen(target)
    reports = [_verified(screen, entry, level) for entry in entries]
    if screen.json:
        screen.data("ckpt.verify", reports)
    return 0 if all(report["ok"] for report in reports) else CheckpointInvalid.exit_code


def _chosen(target: str) -> list[Any]:
    from checkpointing.catalog import Catalog

    name, _, step = target.partition("@") if not target.startswith("@") else _split_last(target)
    with open_store(readonly=True) as store:
        run = store.run(name)
    entries = Catalog(RunDir(Path(run.run_dir)).checkpoints).committed()
    if not entries:
        raise NotFound(f"{run.name} has no committed checkpoint", where=run.run_dir, hint=f"orch show {run.name}")
    if step == "all":
        return list(entries)
    if step in ("", "latest"):
        return list(entries[:1])
    if not step.isdigit():
        raise ConfigError(f"`{step}` is not a step", where=target, hint="write RUN@500, RUN@latest or RUN@all")
    same = [entry for entry in entries if entry.step == int(step)]
    if not same:
        steps = ", ".join(str(entry.step) for entry in entries[:8])
        raise NotFound(f"{run.name} has no checkpoint of step {step}", where=run.run_dir, hint=f"there are: {steps}")
    return same


def _split_last(target: str) -> tuple[str, str, str]:
    """`@last@500` means step 500 of the last run."""
    name, mark, step = target[1:].partition("@")
    return f"@{name}", mark, step


def _verified(screen: Screen, entry: Any, level: int) -> dict[str, Any]:
    from checkpointing.verify import verify as compare

    with screen.bar(f"step {entry.step}") as meter:
        report = compare(entry.path, level, meter)
    rate = report.bytes / report.seconds / 1024**3 if report.seconds > 0 else 0.0
    if not screen.json:
        word = "VALID" if report.ok else "INVALID"
        read = f"{size(report.bytes)} in {report.seconds:.2f} s, {rate:.2f} GiB/s" if level else "sizes only"
        screen.say(f"{entry.name}: {word}  (level {level}; {read})")
        for fault in report.faults:
            chunk = "" if fault.chunk is None else f", chunk {fault.chunk}"
            screen.say(f"  {fault.file}{chunk}: {fault.reason}")
    return {
        "name": entry.name, "step": entry.step, "path": str(entry.path), "ok": report.ok, "level": level,
        "bytes": report.bytes, "seconds": round(report.seconds, 4), "gib_per_s": round(rate, 3),
        "faults": [asdict(fault) for fault in report.faults],
    }  # fmt: skip
