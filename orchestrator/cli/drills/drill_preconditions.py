"""PURE: faults that a run cannot be hit by, or that nobody would notice in it, by what its configuration says."""

from orchestrator.cli.drills.scorecard import EXPECTED
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind

_FROM_OUTSIDE = ("kill-rank", "kill-agent", "kill-node", "full-disk")
"""Faults that need nothing of a rank, and whose end everybody sees."""


def why_undetectable(kind: str, config: JobConfig) -> str | None:
    """Why a drill of this kind would come to nothing; None where it is noticed."""
    command, recovery = config.command, config.recovery
    # A program of the user's own has no progress cell: it takes no orders, and nobody knows its steps.
    if command and kind == "stop-rank":
        return (
            "its ranks run a command of their own, which is not watched for hangs: they would wait until the time limit"
        )
    if command and kind == "corrupt-checkpoint":
        return "its ranks are a command of its own, which saves and loads in its own way"
    if command and kind not in _FROM_OUTSIDE:
        return "its ranks are a command of its own, which takes no such order"
    # What stands still is found by the watch alone.
    if EventKind.INCIDENT in EXPECTED[kind].signs and not recovery.hang.on:
        return "hang detection is off (recovery.hang.on=false): its ranks would wait until the time limit"
    # So is what is slow, by the comparison of ranks.
    if EventKind.STRAGGLER in EXPECTED[kind].signs and not recovery.straggler.on:
        return "straggler detection is off (recovery.straggler.on=false): the rank would stay slow"
    return None
