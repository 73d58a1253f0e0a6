"""PURE: what is true of each kind of failure. A new kind needs its row here, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from trainer.contract.failures.outcome import FailureKind


class Budget(StrEnum):
    """What a failure without progress uses up; a new checkpoint gives all of it back."""

    PERSON = "person"  # comes back until somebody changes something: no retry
    TRIES = "tries"  # the program or the cluster: `recovery.max_failures`
    TIME = "time"  # the cluster, which heals: `recovery.no_progress_hours`
    NOTHING = "nothing"  # orch itself ended it before it began: no pause either


class Blame(StrEnum):
    """What a failure that names a node says of it."""

    NOTHING = "nothing"
    WEAK = "weak"  # it happened there: evidence only when it happens more often than elsewhere
    NODE = "node"  # the node by itself


class Losses(StrEnum):
    """In which rate of failures it counts: whose unsaved steps it may cost again."""

    NOBODY = "nobody"
    RUN = "run"  # a bug, or a need for memory, is its own run's affair
    CLUSTER = "cluster"


@dataclass(frozen=True, kw_only=True)
class FailureTraits:
    """One row of the table."""

    budget: Budget
    blame: Blame = Blame.NOTHING
    losses: Losses = Losses.NOBODY
    restarts_in_place: bool = False  # a new generation on the same nodes mends it
    comes_back: bool = False  # within a job, until somebody has changed something
    examined: bool = False  # declared after all ranks were examined: no rank will report anything else
    of_the_state: bool = False  # what was loaded from a checkpoint can be the cause
    of_the_program: bool = False  # a program raises it by itself
    seen_inside: bool = False  # Slurm's word about the end of the job must not cover it
    asked_to_stop: bool = False  # the job says that it had to stop: no failure of anybody's, and no drill's
    free: bool = False  # nobody's failure while the run makes progress
    asked_by_slurm: bool = False  # why Slurm asks a job to stop


TRAITS: dict[FailureKind, FailureTraits] = {
    FailureKind.RANK_KILLED: FailureTraits(
        budget=Budget.TRIES, blame=Blame.WEAK, losses=Losses.CLUSTER, restarts_in_place=True, of_the_state=True
    ),
    FailureKind.OUT_OF_MEMORY: FailureTraits(
        budget=Budget.TRIES, losses=Losses.RUN, restarts_in_place=True, of_the_program=True, seen_inside=True
    ),
    FailureKind.USER_ERROR: FailureTraits(
        budget=Budget.PERSON, losses=Losses.RUN, comes_back=True, of_the_state=True, of_the_program=True,
        seen_inside=True,
    ),
    FailureKind.EXCEPTION: FailureTraits(
        budget=Budget.TRIES, losses=Losses.RUN, restarts_in_place=True, of_the_state=True, of_the_program=True,
        seen_inside=True,
    ),
    FailureKind.NODE_LOST: FailureTraits(
        budget=Budget.TIME, blame=Blame.NODE, losses=Losses.CLUSTER, asked_by_slurm=True
    ),
    FailureKind.AGENT_LOST: FailureTraits(budget=Budget.TIME, blame=Blame.WEAK, losses=Losses.CLUSTER),
    FailureKind.NODE_SUSPECT: FailureTraits(
        budget=Budget.TIME, blame=Blame.NODE, losses=Losses.CLUSTER, seen_inside=True
    ),
    FailureKind.PREEMPTED: FailureTraits(
        budget=Budget.TIME, losses=Losses.CLUSTER, asked_to_stop=True, free=True, asked_by_slurm=True
    ),
    FailureKind.TIME_LIMIT: FailureTraits(budget=Budget.TRIES, asked_to_stop=True, free=True, asked_by_slurm=True),
    FailureKind.CANCELLED: FailureTraits(budget=Budget.PERSON, asked_to_stop=True),
    FailureKind.JOB_LOST: FailureTraits(budget=Budget.TIME, losses=Losses.CLUSTER),
    FailureKind.NODES_MISSING: FailureTraits(budget=Budget.NOTHING),
    FailureKind.LAUNCH_FAILED: FailureTraits(budget=Budget.TIME, blame=Blame.WEAK),
    FailureKind.SUBMIT_REJECTED: FailureTraits(budget=Budget.PERSON),
    FailureKind.SUBMIT_DEFERRED: FailureTraits(budget=Budget.TIME),
    FailureKind.SUBMISSION_LOST: FailureTraits(budget=Budget.PERSON),
    FailureKind.HANG: FailureTraits(budget=Budget.TRIES, blame=Blame.WEAK, restarts_in_place=True, examined=True),
    FailureKind.DESYNC: FailureTraits(budget=Budget.PERSON, comes_back=True, examined=True),
    FailureKind.NUMERIC: FailureTraits(budget=Budget.PERSON, comes_back=True, of_the_state=True),
    FailureKind.STORAGE: FailureTraits(budget=Budget.TIME, seen_inside=True),
    FailureKind.INSTALLATION: FailureTraits(budget=Budget.PERSON, comes_back=True, seen_inside=True),
    FailureKind.UNKNOWN: FailureTraits(budget=Budget.TRIES, losses=Losses.CLUSTER),
}  # fmt: skip
"""Every kind; docs/failures.md has it in words, and a test compares the two."""


def kinds_with(holds: Callable[[FailureTraits], bool]) -> frozenset[FailureKind]:
    """The kinds of which this is true."""
    return frozenset(kind for kind, traits in TRAITS.items() if holds(traits))
