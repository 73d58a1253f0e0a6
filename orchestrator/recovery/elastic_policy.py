"""PURE: how many nodes the next attempt asks for, and when a job no longer waits for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.recovery.world_sizes import WorldSize
from trainer.contract.failures.outcome import FailureKind
from trainer.contract.time_spans import span


@dataclass(frozen=True, kw_only=True)
class SizeChoice:
    """What an attempt asks for, and why; `reason` is empty for the full size of a run that never had less."""

    size: WorldSize
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LastAttempt:
    """What the run's newest attempt had asked for, and how it ended."""

    asked: int  # nodes, spare ones included
    kind: FailureKind | None = None
    reason: str = ""  # of its failure
    refused_for: float = 0.0  # seconds since the scheduler began to refuse jobs of this size


def give_up_waiting(
    sizes: Sequence[WorldSize], asked: int, waited: float, patience: float, usable: int | None
) -> str:  # fmt: skip
    """Why a job that has waited for `asked` nodes is to make room for a smaller one; empty while it waits on.

    `sizes`: largest first; `waited`, `patience`: seconds; `usable`: nodes that are in service and not excluded, busy
    ones too, None where the scheduler cannot tell.
    """
    if waited < patience:
        return ""
    smaller = [size for size in sizes if size.all_nodes < asked]
    # A smaller job would wait just as long.
    if not _fits(smaller, usable):
        return ""
    return f"{_missing(asked, usable)} for {span(waited)} (recovery.patience={patience:g})"


def _missing(asked: int, usable: int | None) -> str:
    """What the job has waited for."""
    if usable is None or usable >= asked:
        return f"{_nodes(asked)} {'was' if asked == 1 else 'were'} not free"
    return f"{_nodes(asked - usable)} {'was' if asked - usable == 1 else 'were'} missing"


def needs_choice(sizes: Sequence[WorldSize], last: LastAttempt) -> bool:
    """Whether it has to be asked what is in service: after most full attempts the next one is full."""
    shrinks = last.kind in (FailureKind.NODES_MISSING, FailureKind.SUBMIT_DEFERRED)
    return len(sizes) > 1 and (shrinks or last.asked < sizes[0].all_nodes)


def next_size(sizes: Sequence[WorldSize], last: LastAttempt, usable: int | None, patience: float) -> SizeChoice:
    """What the next attempt asks for, after `last`.

    `sizes`, `usable` and `patience` as for `give_up_waiting`.
    """
    full = sizes[0]
    # It was given up for want of nodes: whatever is free by now, the next one asks for less.
    if last.kind is FailureKind.NODES_MISSING:
        smaller = [size for size in sizes if size.all_nodes < last.asked] or [sizes[-1]]
        return SizeChoice(size=_largest(smaller, usable), reason=last.reason)
    # Where nodes are gone from the partition, a job of so many is not even queued.
    short = last.kind is FailureKind.SUBMIT_DEFERRED and usable is not None and usable < last.asked
    if short and last.refused_for >= patience and _fits(sizes, usable):
        lasts = f"{_missing(last.asked, usable)} for {span(last.refused_for)}, and such a job is refused"
        return SizeChoice(size=_largest(sizes, usable), reason=f"{lasts} (recovery.patience={patience:g})")
    # Nodes that went lost a moment ago may be back before `recovery.patience` is over.
    if last.asked >= full.all_nodes or len(sizes) == 1:
        return SizeChoice(size=full)
    size = full if usable is None else _largest(sizes, usable)
    if size is full:
        said = "" if usable is None else f": Slurm has {_nodes(usable)} in service"
        return SizeChoice(size=full, reason=f"all {_nodes(full.all_nodes)} again{said}")
    missing = full.all_nodes - (usable or 0)
    return SizeChoice(size=size, reason=f"{_nodes(missing)} {'is' if missing == 1 else 'are'} still missing")


def _fits(sizes: Sequence[WorldSize], usable: int | None) -> bool:
    """Whether the smallest of these sizes could start."""
    return bool(sizes) and (usable is None or sizes[-1].all_nodes <= usable)


def _largest(sizes: Sequence[WorldSize], usable: int | None) -> WorldSize:
    """The largest size that fits, else the smallest, which can start first."""
    return next((size for size in sizes if usable is None or size.all_nodes <= usable), sizes[-1])


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
