"""`orch ckpt diff`: differences of two checkpoints by tensor, and of the configurations of their runs."""

from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.checkpoints import verify
from orchestrator.cli.checkpoints.target import Target, find_one, kept_while_read, require_there
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count
from orchestrator.errors import CheckpointInvalid

if TYPE_CHECKING:
    from checkpointing.verification.verdicts import TensorDiff

SHOWN = 40
"""Maximum number of tensors shown on a terminal without --all."""


DIFF_JSON = """
{first, second, equal, parts: [{part, tensors, equal, apart}], tensors: [{tensor, part, equal, what, largest,
relative, changed, dtype, shape}], config: [{key, first, second}]}
"""


@click.command("diff", cls=Verb, json_data=DIFF_JSON)
@click.argument("first", metavar="FIRST")
@click.argument("second", metavar="SECOND")
@click.option("-a", "--all", "everything", is_flag=True, help="List all tensors, equal ones too.")
@click.pass_obj
def diff(screen: Screen, first: str, second: str, everything: bool) -> None:
    """Compare two checkpoints: RUN@STEP each, or folders.

    Tensors with equal fingerprints are not read (`equal by fingerprint`; an even number of changed signs in 4- or
    8-byte floats is not seen). The others are verified as they are read (exit code 7). For them it prints the
    largest difference of a value, the norm of the difference relative to the larger norm, and the share of values
    that changed, largest relative difference first.

    It also prints how many tensors of each part (`model`, `optimizer`) are equal, and the keys in which the
    configurations of two runs differ. The exit code is 0 whether or not they differ.
    """
    left, right = find_one(first, screen.warn), find_one(second, screen.warn)
    with kept_while_read(left, right):
        found = _compare_targets(screen, left, right)
    changed = [item for item in found if not item.equal]
    settings = _settings(left, right)
    if screen.json:
        rows = [_row(item) for item in (found if everything else changed)]
        answer = {"first": left.path, "second": right.path, "equal": not changed, "parts": _parts(found)}
        screen.data("ckpt.diff", {**answer, "tensors": rows, "config": settings})
        return
    # Lists are cut on a terminal only.
    shown = changed[:SHOWN] if screen.terminal else changed
    _show(screen, found if everything else shown, len(changed))
    for part in _parts(found):
        screen.say(
            f"{part['part']}: {part['equal']} of {part['tensors']} tensors equal"
            + (f", {part['apart']} not comparable" if part["apart"] else "")
        )
    _show_settings(screen, settings)


def _compare_targets(screen: Screen, left: Target, right: Target) -> "list[TensorDiff]":
    verify.prepare()
    from checkpointing.engine.audit.diff import compare, open_side  # torch: seconds to import
    from checkpointing.errors import CheckpointRefused

    side = left  # the side to name in a refusal; two copies of one checkpoint have the same name
    try:
        first = open_side(left.storage, left.name)
        side = right
        second = open_side(right.storage, right.name)
        with screen.bar("compare") as meter:
            found: list[TensorDiff] = compare(first, second, meter)
    except (CheckpointRefused, FileNotFoundError) as refusal:
        require_there(left, right)
        if not isinstance(refusal, CheckpointRefused):
            raise
        side = side if refusal.name == side.name else left
        raise CheckpointInvalid(
            f"{refusal.name} cannot be compared: {refusal.reason}", hint=f"orch ckpt verify {side.path}"
        ) from refusal  # fmt: skip
    return found


def _part(key: str) -> str:
    """Return the first part of a key: `model/`, `optimizer/` or `rng/`; keys of foreign files may use dots."""
    return key.replace(".", "/").partition("/")[0]


def _parts(found: "list[TensorDiff]") -> list[dict[str, Any]]:
    """Count tensors by part of the state, the model first."""
    parts: dict[str, dict[str, Any]] = {}
    for item in found:
        part = parts.setdefault(_part(item.key), {"part": _part(item.key), "tensors": 0, "equal": 0, "apart": 0})
        part["tensors"] += 1
        part["equal"] += item.equal
        part["apart"] += not item.comparable
    return sorted(parts.values(), key=lambda part: (part["part"] != "model", part["part"]))


def _row(item: "TensorDiff") -> dict[str, Any]:
    here, there = item.first, item.second
    return {
        "tensor": item.key, "part": _part(item.key), "equal": item.equal, "what": _what(item),
        "largest": item.largest, "relative": item.relative, "changed": item.changed,
        "dtype": [here.dtype if here else None, there.dtype if there else None],
        "shape": [list(here.shape) if here else None, list(there.shape) if there else None],
    }  # fmt: skip


def _what(item: "TensorDiff") -> str:
    """Describe the change of the tensor in a few words."""
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


def _show(screen: Screen, found: "list[TensorDiff]", changed: int) -> None:
    columns = [
        Column("RELATIVE", "relative", _number, right=True),
        Column("LARGEST", "largest", _number, right=True),
        Column("CHANGED", "changed", _share, right=True),
        Column("PART", "part"),
        Column("TENSOR", "tensor"),
        Column("WHAT", "what"),
    ]
    screen.table(columns, [_row(item) for item in found])
    if not changed:
        screen.say("every tensor is equal")
    elif len(found) < changed:
        screen.note(f"{count(changed - len(found))} more differ; --all lists them")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}%"


def _settings(left: Target, right: Target) -> list[dict[str, Any]]:
    """Return the keys in which the configurations of the two runs differ; empty if one is unknown."""
    files = [target.config_file for target in (left, right)]
    if None in files:
        return []
    from checkpointing.storage.durable import read_json
    from orchestrator.config import compose
    from orchestrator.config.redaction import redacted_value

    try:
        first, second = (read_json(file) for file in files if file is not None)
    except (OSError, ValueError):
        return []
    changed = compose.diff(first, second)
    return [
        {"key": key, "first": redacted_value(key, old), "second": redacted_value(key, new)}
        for key, (old, new) in changed.items()
    ]


def _show_settings(screen: Screen, settings: list[dict[str, Any]]) -> None:
    from checkpointing.storage.durable import dump_line

    if settings:
        screen.say("configuration:")
    for item in settings:
        screen.say(f"  {item['key']}  {dump_line(item['first'])} -> {dump_line(item['second'])}")
