"""`orch ckpt verify`, at four levels."""

import os
import time
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from checkpointing.storage.storage_errors import error_words
from orchestrator.cli.checkpoints.target import Target, find, kept_while_read, require_there
from orchestrator.cli.checkpoints.tiers import missing_files
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, size
from orchestrator.errors import CheckpointInvalid, NotFound, Precondition


def prepare() -> None:
    """Use one thread, since many are slower on few cores and a login node is shared; silence NumPy's warning."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)


if TYPE_CHECKING:
    from checkpointing.verification.verify import Fault, Report

LEAST_KEPT = 2
"""Lowest level whose result is recorded; lower levels leave most bytes unread."""

SHOWN = 20
"""Maximum number of faults of one checkpoint in text output; JSON has all."""


VERIFY_JSON = """
list of {name, step, path, ok, unreadable, level, bytes, seconds, gib_per_s, tier, faults: [{file, chunk, tensor,
tensors, reason}], notes}; unreadable: no fault was found, but some files could not be read now; notes name what was
missing and so was not checked
"""


@click.command("verify", cls=Verb, json_data=VERIFY_JSON)
@click.argument("target", metavar="RUN[@STEP]|FOLDER")
@click.option(
    "--level",
    type=click.IntRange(0, 4),
    metavar="N",
    default=2,
    show_default=True,
    help="0: COMMIT, manifest, names and sizes of files. 1: also a sample of the chunks, with both ends of every file. "
    "2: every chunk. 3: also metadata, index and tensor headers against each other (holes, overlaps, shapes, dtypes), "
    "and unlisted files. 4: also every value: fingerprints, NaN in trained parameters, random generators.",
)
@click.option("--copies", is_flag=True, help="Verify every copy on every tier, not only the nearest one.")
@click.pass_obj
def verify(screen: Screen, target: str, level: int, copies: bool) -> int:
    """Compare a checkpoint's bytes with the digests taken when it was written.

    Without @STEP it takes the newest one; `@all` takes every one. The exit code is 7 if there is any fault, else 4 if
    the place does not answer or a file cannot be read now. Each fault names file, chunk and tensors if possible.

    From level 2 on the result is recorded: `orch ckpt ls` shows it, and retention never counts a bad copy as a
    substitute. Levels 3 and 4 import torch and read files twice. On a node's own disk (`shared: false`) the files
    that are there are verified, up to level 2.
    """
    screen.if_interrupted = lambda: "interrupted: only results that were printed are recorded"
    found = find(target, screen.warn)
    chosen = found if copies else list({item.name: item for item in reversed(found)}.values())[::-1]
    answers = [
        answer for item in chosen if (answer := _verify_pinned(screen, item, level, alone=len(chosen) == 1)) is not None
    ]
    if screen.json:
        screen.data("ckpt.verify", answers)
    if not all(answer["ok"] or answer["unreadable"] for answer in answers):
        return CheckpointInvalid.exit_code
    return Precondition.exit_code if any(answer["unreadable"] for answer in answers) else 0


def _verify_pinned(screen: Screen, target: Target, level: int, *, alone: bool) -> dict[str, Any] | None:
    """Verify one checkpoint, pinned meanwhile. Returns None if it is one of several and its run has deleted it."""
    try:
        with kept_while_read(target):
            return _answer(screen, target, level)
    except NotFound as error:
        if alone:
            raise
        screen.note(f"{error.what}: left out")
        return None


def _answer(screen: Screen, target: Target, level: int) -> dict[str, Any]:
    with screen.bar(target.name if target.step is None else f"step {target.step}") as meter:
        report = _report(target, level, meter)
    if not report.ok and target.run is not None:
        require_there(target)  # a checkpoint that its run deleted meanwhile is not faulty
    rate = report.bytes / report.seconds / 1024**3 if report.seconds > 0 else 0.0
    _show(screen, target, report, rate)
    _record_verdict(screen, target, report)
    return {
        "name": target.name, "step": target.step, "path": target.path, "ok": report.ok,
        "unreadable": _is_unreadable(report), "level": report.level, "bytes": report.bytes,
        "seconds": round(report.seconds, 4), "gib_per_s": round(rate, 3), "tier": target.tier,
        "faults": [_fault(fault) for fault in report.faults], "notes": list(report.notes),
    }  # fmt: skip


def _is_unreadable(report: "Report") -> bool:
    """Return whether every fault is a file that cannot be read now, which says nothing about the checkpoint."""
    return not report.ok and all(fault.is_unreadable for fault in report.faults)


def _report(target: Target, level: int, meter: Any) -> "Report":
    _check_readable(target)
    if not target.shared:
        absent, count = missing_files(target.storage, target.name)
        if absent:
            return _part(target, level, meter, absent, count)
    return _whole(target, level, meter)


def _check_readable(target: Target) -> None:
    """Raise the OSError of a place that does not answer. That is not a fault of the checkpoint."""
    from checkpointing.errors import ManifestError
    from checkpointing.format.commit import read_commit

    # Other faults of COMMIT are reported by the verification.
    with suppress(ManifestError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        read_commit(target.storage, target.name)


def _part(target: Target, level: int, meter: Any, absent: Collection[str], count: int) -> "Report":
    """Verify the files of a checkpoint that this node has. Structure and values need all files."""
    from checkpointing.verification.verify import verify_checkpoint

    report = verify_checkpoint(target.storage, target.name, min(level, 2), meter)
    faults = tuple(fault for fault in report.faults if fault.file not in absent)
    notes = [f"{len(absent)} of {count} files, which other nodes have: that part was not looked at"]
    notes += ["structure and values (levels 3 and 4), which need every file: not looked at"] if level > 2 else []
    return replace(report, ok=not faults, faults=faults, notes=tuple(notes))


def _whole(target: Target, level: int, meter: Any) -> "Report":
    if level < 3:
        from checkpointing.verification.verify import verify_checkpoint

        return verify_checkpoint(target.storage, target.name, level, meter)
    prepare()
    # Only these levels need torch, which takes seconds to import.
    from checkpointing.engine.audit.audit import audit_checkpoint
    from trainer.worker.saved_state.checkpoint_contents import expected_entries

    report: Report = audit_checkpoint(target.storage, target.name, level, meter, expected_entries)
    return report


def _record_verdict(screen: Screen, target: Target, report: "Report") -> None:
    """Record the result for a run's checkpoint, so that retention does not rely on a bad copy."""
    if target.run_dir is None or report.level < LEAST_KEPT:
        return
    if report.faults and not any(fault.is_damage for fault in report.faults):
        return  # a file that is unreadable now may be readable later
    from checkpointing.storage.backends import LocalStorage
    from checkpointing.tiers.catalog import Catalog
    from checkpointing.verification import verdicts

    own = LocalStorage(target.run_dir.checkpoints)
    place = target.path.rpartition("/")[0]
    try:
        found = verdicts.CopyVerdict(
            name=target.name, place=place, manifest=verdicts.read_manifest_digest(target.storage, target.name),
            ok=report.ok,
            level=report.level, at=time.time(), reason=_line(report.faults[0]) if report.faults else "",
        )  # fmt: skip
        verdicts.record(own, found)
        verdicts.forget(own, place, Catalog(place, target.storage).names())
    except OSError as error:
        screen.warn("NotKept", f"what was found of {target.name} could not be written down: {error_words(error)}")


def _show(screen: Screen, target: Target, report: "Report", rate: float) -> None:
    word = "UNREADABLE" if _is_unreadable(report) else "VALID" if report.ok else "INVALID"
    read = f"{size(report.bytes)} in {report.seconds:.2f} s, {rate:.2f} GiB/s" if report.level else "sizes only"
    place = f" on {target.tier}" if target.tier not in ("", "run") else ""
    screen.say(f"{target.name}{place}: {word}  (level {report.level}; {read})")
    for note in report.notes:
        screen.note(f"  {note}")
    for fault in report.faults[:SHOWN]:
        screen.say(f"  {_line(fault)}")
    if len(report.faults) > SHOWN:
        screen.say(f"  and {len(report.faults) - SHOWN} more; --json tells all")


def _line(fault: "Fault") -> str:
    chunk = "" if fault.chunk is None else f", chunk {fault.chunk}"
    tensor = f", {fault.tensor}" if fault.tensor else ""
    return f"{fault.file}{chunk}{tensor}: {fault.reason}"


def _fault(fault: "Fault") -> dict[str, Any]:
    return {
        "file": fault.file, "chunk": fault.chunk, "tensor": fault.tensor, "tensors": list(fault.tensors),
        "reason": fault.reason,
    }  # fmt: skip
