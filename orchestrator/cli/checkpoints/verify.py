"""`orch ckpt verify`, at levels 0 to 4, and `orch ckpt diff`, by tensor and by configuration."""

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click

from checkpointing.errors import CheckpointRefused, ManifestError
from checkpointing.format.commit import read_commit
from checkpointing.storage.durable import dump_line, read_json
from checkpointing.storage.storage_errors import error_words
from checkpointing.tiers.catalog import Catalog
from checkpointing.verification import verdicts
from checkpointing.verification.verdicts import TensorDiff
from checkpointing.verification.verify import Fault, Report, verify_checkpoint
from orchestrator.cli.checkpoints.sealed import find_sealed, verify_sealed
from orchestrator.cli.checkpoints.target import Target, find, find_one, kept_while_read, require_there
from orchestrator.cli.checkpoints.tiers import missing_files
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, size
from orchestrator.errors import CheckpointInvalid, NotFound, Precondition

LEAST_KEPT = 2
"""Lowest level whose result is recorded, because lower levels leave most bytes unread."""
SHOWN_FAULTS, SHOWN_TENSORS = 20, 40
"""Maximum number of faults per checkpoint in text output, and of tensors on a terminal without --all."""


def prepare() -> None:
    """Use one thread, because many users share a login node's few cores; silence torch's warning about NumPy."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)


VERIFY_JSON = """
list of {name, step, path, ok, unreadable, level, bytes, seconds, gib_per_s, tier, faults: [{file, chunk, tensor,
tensors, reason}], notes}; unreadable: no fault was found, but some files could not be read now; notes list what was
missing and therefore not checked
"""


@click.command("verify", cls=Verb, json_data=VERIFY_JSON)
@click.argument("target", metavar="RUN[@STEP]|FOLDER")
@click.option(
    "--level", type=click.IntRange(0, 4), metavar="N", default=2, show_default=True,
    help="0: COMMIT, manifest, file names and sizes. 1: also a sample of the chunks, with both ends of every file. "
    "2: every chunk. 3: also metadata, index and tensor headers against each other (holes, overlaps, shapes, dtypes), "
    "and unlisted files. 4: also every value: fingerprints, NaN in trained parameters, random generators.",
)  # fmt: skip
@click.option("--copies", is_flag=True, help="Verify every copy on every tier, not only the nearest one.")
@click.pass_obj
def verify(screen: Screen, target: str, level: int, copies: bool) -> int:
    """Compare a checkpoint's bytes with the digests taken when it was written.

    Without @STEP it verifies the newest checkpoint; with `@all`, every checkpoint. Checkpoints of a `command:` are
    compared with their seals, whatever the level. The exit code is 7 if there is any fault, else 4 if storage does not
    answer or a file cannot be read now. Faults name the file, chunk and tensors where possible.

    From level 2 up, the result is recorded: `orch ckpt ls` shows it, and retention never counts a bad copy as a
    substitute. Levels 3 and 4 import torch and read files twice. On a node's own disk (`shared: false`) only
    the files on that disk are verified, up to level 2.
    """
    if (seals := find_sealed(target)) is not None:
        return verify_sealed(screen, seals)
    screen.if_interrupted = lambda: "interrupted: only results that were printed are recorded"
    found = find(target, screen.warn)
    chosen = found if copies else list({item.name: item for item in reversed(found)}.values())[::-1]
    answers = []
    for item in chosen:
        try:
            with kept_while_read(item):
                answers.append(_verify_one(screen, item, level))
        except NotFound as error:
            if len(chosen) == 1:
                raise
            screen.note(f"{error.what}: left out")  # its run has just deleted it
    if screen.json:
        screen.data("ckpt.verify", answers)
    if not all(answer["ok"] or answer["unreadable"] for answer in answers):
        return CheckpointInvalid.exit_code
    return Precondition.exit_code if any(answer["unreadable"] for answer in answers) else 0


def _verify_one(screen: Screen, target: Target, level: int) -> dict[str, Any]:
    """Verify one checkpoint, print and record the result, and return it as plain JSON data."""
    with screen.bar(target.name if target.step is None else f"step {target.step}") as meter:
        report = _report(target, level, meter)
    if not report.ok and target.run is not None:
        require_there(target)  # a checkpoint that its run has just deleted is not faulty
    rate = report.bytes / report.seconds / 1024**3 if report.seconds > 0 else 0.0
    # A file that cannot be read now does not prove that the checkpoint is faulty.
    unreadable = not report.ok and all(fault.is_unreadable for fault in report.faults)
    word = "UNREADABLE" if unreadable else "VALID" if report.ok else "INVALID"
    read = f"{size(report.bytes)} in {report.seconds:.2f} s, {rate:.2f} GiB/s" if report.level else "sizes only"
    place = f" on {target.tier}" if target.tier not in ("", "run") else ""
    screen.say(f"{target.name}{place}: {word}  (level {report.level}; {read})")
    for note in report.notes:
        screen.note(f"  {note}")
    for fault in report.faults[:SHOWN_FAULTS]:
        screen.say(f"  {_line(fault)}")
    if len(report.faults) > SHOWN_FAULTS:
        screen.say(f"  and {len(report.faults) - SHOWN_FAULTS} more; --json lists all")
    _record_verdict(screen, target, report)
    keys = ("file", "chunk", "tensor", "tensors", "reason")
    return {
        "name": target.name, "step": target.step, "path": target.path, "ok": report.ok, "unreadable": unreadable,
        "level": report.level, "bytes": report.bytes, "seconds": round(report.seconds, 4), "gib_per_s": round(rate, 3),
        "tier": target.tier, "faults": [{key: getattr(fault, key) for key in keys} for fault in report.faults],
        "notes": list(report.notes),
    }  # fmt: skip


def _report(target: Target, level: int, meter: Any) -> Report:
    """Verify a checkpoint, or the part of it that this node has. Raises OSError if its storage does not answer."""
    # The verification reports other faults in COMMIT.
    with suppress(ManifestError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        read_commit(target.storage, target.name)
    absent, total = (frozenset(), 0) if target.shared else missing_files(target.storage, target.name)
    if absent:
        # Checking structure and values needs all files.
        report = verify_checkpoint(target.storage, target.name, min(level, 2), meter)
        faults = tuple(fault for fault in report.faults if fault.file not in absent)
        notes = [f"{len(absent)} of {total} files are on other nodes: not checked"]
        notes += ["structure and values (levels 3 and 4), which need every file: not checked"] if level > 2 else []
        return replace(report, ok=not faults, faults=faults, notes=tuple(notes))
    if level < 3:
        return verify_checkpoint(target.storage, target.name, level, meter)
    prepare()
    # Only these levels need torch, which takes seconds to import.
    from checkpointing.engine.audit.audit import audit_checkpoint
    from trainer.worker.saved_state.checkpoint_contents import expected_entries

    whole: Report = audit_checkpoint(target.storage, target.name, level, meter, expected_entries)
    return whole


def _record_verdict(screen: Screen, target: Target, report: Report) -> None:
    """Record the result for a run's checkpoint, so that retention does not rely on a bad copy."""
    if target.pins is None or report.level < LEAST_KEPT:
        return
    if report.faults and not any(fault.is_damage for fault in report.faults):
        return  # a file that is unreadable now may be readable later
    try:
        found = verdicts.CopyVerdict(
            name=target.name, place=target.place, ok=report.ok, level=report.level, at=time.time(),
            manifest=verdicts.read_manifest_digest(target.storage, target.name),
            reason=_line(report.faults[0]) if report.faults else "",
        )  # fmt: skip
        verdicts.record(target.pins, found)
        verdicts.forget(target.pins, target.place, Catalog(target.place, target.storage).names())
    except OSError as error:
        screen.warn("NotKept", f"could not record the verification result for {target.name}: {error_words(error)}")


def _line(fault: Fault) -> str:
    chunk = "" if fault.chunk is None else f", chunk {fault.chunk}"
    tensor = f", {fault.tensor}" if fault.tensor else ""
    return f"{fault.file}{chunk}{tensor}: {fault.reason}"


DIFF_JSON = """
{first, second, equal, parts: [{part, tensors, equal, apart}], tensors: [{tensor, part, equal, what, largest,
relative, changed, dtype, shape}], config: [{key, first, second}]}
"""


@click.command("diff", cls=Verb, json_data=DIFF_JSON)
@click.argument("first", metavar="FIRST")
@click.argument("second", metavar="SECOND")
@click.option("-a", "--all", "everything", is_flag=True, help="List all tensors, including equal ones.")
@click.pass_obj
def diff(screen: Screen, first: str, second: str, everything: bool) -> None:
    """Compare two checkpoints, each given as RUN@STEP or as a folder.

    Tensors with equal fingerprints are not read (`equal by fingerprint`; an even number of changed signs in 4- or
    8-byte floats goes unnoticed). The others are verified as they are read (exit code 7 if damaged). For each of them
    it prints the largest difference between two values, the norm of the difference relative to the larger norm, and the
    share of values that changed. The largest relative difference comes first.

    It also prints how many tensors of each part (`model`, `optimizer`) are equal, and the configuration keys in which
    the two runs differ. The exit code is 0 whether or not they differ.
    """
    left, right = find_one(first, screen.warn), find_one(second, screen.warn)
    with kept_while_read(left, right):
        found = _compare_targets(screen, left, right)
    changed = [item for item in found if not item.equal]
    parts, settings = _parts(found), _changed_settings(left, right)
    # Lists are shortened only on a terminal.
    shown = found if everything else changed[:SHOWN_TENSORS] if screen.terminal else changed
    rows = [_diff_row(item) for item in shown]
    if screen.json:
        answer = {"first": left.path, "second": right.path, "equal": not changed, "parts": parts}
        screen.data("ckpt.diff", {**answer, "tensors": rows, "config": settings})
        return
    screen.table(_DIFF_COLUMNS, rows)
    if not changed:
        screen.say("every tensor is equal")
    elif len(shown) < len(changed):
        screen.note(f"{count(len(changed) - len(shown))} more differ; --all lists them")
    for part in parts:
        apart = f", {part['apart']} not comparable" if part["apart"] else ""
        screen.say(f"{part['part']}: {part['equal']} of {part['tensors']} tensors equal{apart}")
    if settings:
        screen.say("configuration:")
    for item in settings:
        screen.say(f"  {item['key']}  {dump_line(item['first'])} -> {dump_line(item['second'])}")


def _compare_targets(screen: Screen, left: Target, right: Target) -> Sequence[TensorDiff]:
    prepare()
    from checkpointing.engine.audit.diff import compare  # torch: seconds to import
    from checkpointing.engine.audit.sealed_checkpoint import SealedCheckpoint

    side = left  # the side that a refusal names, because two copies of one checkpoint have the same name
    try:
        first = SealedCheckpoint.open(left.storage, left.name)
        side = right
        second = SealedCheckpoint.open(right.storage, right.name)
        with screen.bar("compare") as meter:
            found: list[TensorDiff] = compare(first, second, meter)
    except FileNotFoundError:
        require_there(left, right)
        raise
    except CheckpointRefused as refusal:
        require_there(left, right)
        side = side if refusal.name == side.name else left
        what = f"{refusal.name} cannot be compared: {refusal.reason}"
        raise CheckpointInvalid(what, hint=f"orch ckpt verify {side.path}") from refusal
    return found


def _part(key: str) -> str:
    """Return the first part of a key, such as `model/`. Keys in foreign files may use dots."""
    return key.replace(".", "/").partition("/")[0]


def _parts(found: Sequence[TensorDiff]) -> list[dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    for item in found:
        part = parts.setdefault(_part(item.key), {"part": _part(item.key), "tensors": 0, "equal": 0, "apart": 0})
        part["tensors"] += 1
        part["equal"] += item.equal
        part["apart"] += not item.comparable
    return sorted(parts.values(), key=lambda part: (part["part"] != "model", part["part"]))


def _diff_row(item: TensorDiff) -> dict[str, Any]:
    here, there = item.first, item.second
    return {
        "tensor": item.key, "part": _part(item.key), "equal": item.equal, "what": _what(item),
        "largest": item.largest, "relative": item.relative, "changed": item.changed,
        "dtype": [here.dtype if here else None, there.dtype if there else None],
        "shape": [list(here.shape) if here else None, list(there.shape) if there else None],
    }  # fmt: skip


def _what(item: TensorDiff) -> str:
    here, there = item.first, item.second
    if here is None or there is None:
        return "only in the second" if here is None else "only in the first"
    if here.shape != there.shape:
        return f"shape {list(here.shape)} -> {list(there.shape)}"
    if here.dtype != there.dtype:
        return f"dtype {here.dtype} -> {there.dtype}"
    if item.by_fingerprint:
        return "equal by fingerprint"
    return "equal" if item.equal else "changed"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


_DIFF_COLUMNS = [
    Column("RELATIVE", "relative", _number, right=True),
    Column("LARGEST", "largest", _number, right=True),
    Column("CHANGED", "changed", lambda value: "-" if value is None else f"{100 * value:.3g}%", right=True),
    Column("PART", "part"),
    Column("TENSOR", "tensor"),
    Column("WHAT", "what"),
]


def _changed_settings(left: Target, right: Target) -> list[dict[str, Any]]:
    """Return the configuration keys in which the two runs differ; empty if a configuration is unknown."""
    from orchestrator.config import compose  # imports omegaconf, which is also slow
    from orchestrator.config.redaction import redacted_value

    try:
        first, second = (read_json(file) for target in (left, right) if (file := target.config_file) is not None)
    except (OSError, ValueError):
        return []
    return [
        {"key": key, "first": redacted_value(key, old), "second": redacted_value(key, new)}
        for key, (old, new) in compose.diff(first, second).items()
    ]
