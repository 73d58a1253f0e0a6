"""PURE: why Slurm lets a job wait, in words, and whether that ends by itself.

Source: the names of reasons in Slurm's tree (src/common/job_state_reason.c) and its manual (squeue, JOB REASON CODES).
"""

import re
from dataclasses import dataclass
from enum import Enum, auto

from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.node_capacity import asked_words

STAYS = "this does not clear by itself"
MAY_STAY = "this may never clear by itself"
LONG_WAIT = 600.0
"""Seconds of one reason after which a wait that may clear by itself is called one that may not: nodes come back."""


class Lasts(Enum):
    """How a wait ends."""

    CLEARS = auto()  # when jobs end, or time passes
    MAY_STAY = auto()  # when somebody else does something
    STAYS = auto()  # never, unless the job asks for something else


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a reason means; `change`: keys to set otherwise, `look`: what tells more."""

    lasts: Lasts
    words: str
    change: str = ""
    look: str = ""
    for_nodes: bool = False  # a job of fewer nodes may start sooner


_NODES_DOWN = "nodes that it needs are down, drained or reserved"
_BUDGET = "the budget of the account or QOS is used up"

_WAITS: tuple[tuple[str, Wait], ...] = (
    ("BadConstraints", Wait(
        lasts=Lasts.STAYS, words="no nodes have all that it asks for",
        change="cluster.nodes=NUMBER cluster.cpus_per_task=NUMBER cluster.mem=SIZE", look="`sinfo -Nel`",
        for_nodes=True,
    )),
    ("PartitionTimeLimit|(QOS|Assoc)MaxWall.*|QOSTimeLimit|AssociationTimeLimit", Wait(
        lasts=Lasts.STAYS, words="cluster.time is longer than is allowed here", change="cluster.time=MINUTES",
        look="`sinfo -o '%P %l'`",
    )),
    ("(QOS|Assoc)Max.*(PerJob|PerNode).*|(QOS|Assoc)Min.*|MaxMemPerLimit", Wait(
        lasts=Lasts.STAYS, words="one job may not ask for so much, or so little", change="cluster.nodes=NUMBER",
        look="`sacctmgr show qos`",
    )),
    ("InvalidAccount|AccountNotAllowed|.*account not permitted.*", Wait(
        lasts=Lasts.STAYS, words="the account may not run here", change="cluster.account=NAME",
        look="`sacctmgr show assoc user=$USER`",
    )),
    ("InvalidQOS|QOSNotAllowed|.*qos not permitted.*", Wait(
        lasts=Lasts.STAYS, words="the QOS may not be used here", change="cluster.qos=NAME", look="`sacctmgr show qos`",
    )),
    ("ReservationDeleted", Wait(
        lasts=Lasts.STAYS, words="its reservation is gone", change="~cluster.sbatch.reservation",
        look="`scontrol show reservation`",
    )),
    ("DependencyNeverSatisfied|JobHoldMaxRequeue|BurstBufferStageInFailed|DeadLine", Wait(
        lasts=Lasts.STAYS, words="Slurm will not start it any more",
    )),
    ("JobHeldAdmin", Wait(lasts=Lasts.MAY_STAY, words="an administrator holds it; ask your site")),
    ("PartitionNodeLimit", Wait(
        lasts=Lasts.MAY_STAY, words="it asks for more nodes than the partition allows, or has in service",
        change="cluster.nodes=NUMBER", look="`scontrol show partition`", for_nodes=True,
    )),
    ("PartitionDown|PartitionInactive", Wait(
        lasts=Lasts.MAY_STAY, words="the partition takes no jobs now", change="cluster.partition=NAME",
        look="`sinfo -s`",
    )),
    ("ReqNodeNotAvail.*maintenance.*", Wait(
        lasts=Lasts.CLEARS, words="its nodes are reserved for maintenance, and its time limit reaches into that",
        for_nodes=True,
    )),
    ("ReqNodeNotAvail.*|NodeDown|nodes required for job are down.*", Wait(
        lasts=Lasts.MAY_STAY, words=_NODES_DOWN, change="cluster.nodes=NUMBER", look="`sinfo -R`", for_nodes=True,
    )),
    ("(QOS|Assoc)Grp.*Minutes.*|QOSUsageThreshold", Wait(
        lasts=Lasts.MAY_STAY, words=_BUDGET, change="cluster.account=NAME", look="`sshare`",
    )),
    ("(QOS|Assoc)(Grp|Max).*|QOSJobLimit|QOSResourceLimit|Association(Job|Resource)Limit", Wait(
        lasts=Lasts.CLEARS, words="a limit on jobs that run at once; it ends when others of them end",
    )),
    ("Resources", Wait(lasts=Lasts.CLEARS, words="it waits for nodes to be free", for_nodes=True)),
    ("Priority", Wait(lasts=Lasts.CLEARS, words="jobs of higher priority are first", for_nodes=True)),
    ("Licenses", Wait(lasts=Lasts.CLEARS, words="it waits for licenses")),
    ("Reservation", Wait(lasts=Lasts.CLEARS, words="it waits for its reservation to begin")),
    ("BeginTime", Wait(lasts=Lasts.CLEARS, words="it may not begin yet")),
)  # fmt: skip
"""The first pattern that the whole reason matches decides."""


def wait_of(reason: str) -> Wait | None:
    """What a reason of Slurm's means; None for one that is not known, or none.

    Some are told in words of their own instead of their names, with blanks or with `_` between them.
    """
    said = reason.strip().replace("_", " ")
    return next((wait for pattern, wait in _WAITS if re.fullmatch(pattern, said, re.IGNORECASE)), None)


def waits_for_nodes(reason: str) -> bool | None:
    """Whether a job of fewer nodes might start sooner; None while Slurm gives no reason (yet)."""
    if reason in ("", "None"):
        return None
    wait = wait_of(reason)
    return wait is not None and wait.for_nodes


def waiting_words(reason: str, asked: Resources, run: str, waited: float) -> str:
    """Why a job waits that has had this reason for `waited` seconds.

    ` (Priority): jobs of higher priority are first`; where it does not end by itself, that and what to type."""
    if reason in ("", "None"):
        return ""
    wait = wait_of(reason)
    if wait is None:
        return f" ({reason})"
    said = f" ({reason}): {wait.words}"
    if reason == "BadConstraints":
        said = f"{said} ({asked_words(asked)})"
    if wait.lasts is Lasts.CLEARS or (wait.lasts is Lasts.MAY_STAY and waited < LONG_WAIT):
        return said
    flag = STAYS if wait.lasts is Lasts.STAYS else MAY_STAY
    looks = f"; {wait.look} tells more" if wait.look else ""
    cure = (
        f"; `orch cancel {run}`, then `orch resume {run} {wait.change}`"
        if wait.change
        else f"; `orch cancel {run}` ends it"
    )
    return f"{said}; {flag}{looks}{cure}"
