"""`orch ckpt verify` for checkpoints of a `command:`, which have seals instead of manifests."""

import time
from pathlib import Path
from typing import Any

from orchestrator.cli.access.run_folder import existing_folder
from orchestrator.cli.checkpoints.target import is_location, saving_run, split_target
from orchestrator.cli.checkpoints.tiers import read_config
from orchestrator.cli.terminal.render import Screen, size
from orchestrator.errors import CheckpointInvalid, ConfigError, NotFound, Precondition
from trainer.protocol.checkpoint_seal import BLOCK, ChangedMeanwhile, CheckpointSeal, find_mismatch
from trainer.protocol.run_dir import RunDir


def find_sealed(words: str) -> list[CheckpointSeal] | None:
    """Return the seals of the matching checkpoints of a `command:`, newest first, or None for any other target.

    Raises NotFound or ConfigError. The checkpoints may have been deleted since.
    """
    if is_location(words):
        return None
    name, step = split_target(words)
    try:
        run = saving_run(name)
    except NotFound:
        return None
    place = existing_folder(run.name, run.run_dir)
    config = read_config(place)
    if config is None or not config.command or any(place.checkpoints.glob("*/COMMIT")):  # those of orch.checkpointer
        return None
    seals = _read_seals(place)
    if not seals:
        hint = f"orch seals complete checkpoints while the program runs; `orch ckpt ls {run.name}` lists all"
        raise NotFound(f"{run.name} has no sealed checkpoint", where=str(place.seals), hint=hint)
    return _select(words, step, seals)


def _read_seals(place: RunDir) -> list[CheckpointSeal]:
    found = [CheckpointSeal.read(path) for path in place.seals.glob("[!.]*.json")]
    return sorted((seal for seal in found if seal is not None), key=lambda seal: (-seal.step, seal.name))


def _select(words: str, step: str, seals: list[CheckpointSeal]) -> list[CheckpointSeal]:
    if step == "all":
        return seals
    if step in ("", "latest"):
        return seals[:1]
    found = [seal for seal in seals if step == seal.name or (step.isdigit() and int(step) == seal.step)]
    if found:
        return found
    hint = f"sealed steps: {', '.join(str(seal.step) for seal in seals[:8])}"
    if step.isdigit():
        raise NotFound(f"no checkpoint of step {step} is sealed", where=words, hint=hint)
    raise ConfigError(f"`{step}` is not a step of a command's checkpoint", where=words, hint=hint)


def verify_sealed(screen: Screen, seals: list[CheckpointSeal]) -> int:
    """Compare checkpoints with their seals, print the results, and return the exit code."""
    answers = [_verify_one(screen, seal) for seal in seals]
    if screen.json:
        screen.data("ckpt.verify", answers)
    if not all(answer["ok"] or answer["unreadable"] for answer in answers):
        return CheckpointInvalid.exit_code
    return Precondition.exit_code if any(answer["unreadable"] for answer in answers) else 0


def _verify_one(screen: Screen, seal: CheckpointSeal) -> dict[str, Any]:
    path, began, done = Path(seal.path), time.monotonic(), 0
    if not path.exists():
        raise NotFound(f"{seal.name} is no longer in its folder", where=seal.path, hint="`orch ckpt ls` has its reason")
    fault, unreadable = "", ""
    with screen.bar(f"step {seal.step}") as meter:

        def tick() -> None:
            nonlocal done
            done = min(done + BLOCK, seal.bytes)
            meter(done, seal.bytes)

        try:
            fault = find_mismatch(seal, path, tick)
        except (OSError, ChangedMeanwhile) as error:
            unreadable = str(error)
    seconds = time.monotonic() - began
    word = "INVALID" if fault else "UNREADABLE" if unreadable else "VALID"
    read = f"sealed; {size(seal.bytes)} in {seconds:.2f} s"
    screen.say(f"{seal.name}: {word}  ({read})")
    if reason := fault or unreadable:
        screen.say(f"  {seal.name} {reason}" if fault else f"  {reason}")
    faults: list[dict[str, Any]] = []
    if reason:
        faults = [{"file": seal.path, "chunk": None, "tensor": None, "tensors": [], "reason": reason}]
    return {
        "name": seal.name, "step": seal.step, "path": seal.path, "ok": not reason, "unreadable": bool(unreadable),
        "level": 2, "bytes": seal.bytes, "seconds": round(seconds, 4),
        "gib_per_s": round(seal.bytes / seconds / 1024**3, 3) if seconds else 0.0, "tier": "", "faults": faults,
        "notes": [],
    }  # fmt: skip
