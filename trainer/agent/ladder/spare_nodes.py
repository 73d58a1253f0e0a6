"""Rung 3: spare nodes replace lost or blamed nodes within the job."""

from trainer.agent.ladder import in_job_policy
from trainer.agent.nodes.roster import Member, Roster
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import Failure, FailureKind


def replace(decision: Decision, roster: Roster, events: EventLog, *, drill: str = "") -> Decision | None:
    """Replace every lost or excluded node with a spare. Return a Decision that ends the attempt if that fails.
    `drill` is the kind of drill that caused the loss, if any.
    This is safe even if a lost node, or a blamed node's ranks, survive out of reach for a while:
    - Its agent ends its ranks when its connection ends or times out, and is never admitted again. A blamed node's agent
      was ordered to kill them and no longer has a node rank.
    - Its ranks cannot train: every step needs all ranks of their generation, and those on other nodes are killed before
      a new generation starts.
    - They cannot commit or delete a checkpoint: rank 0, on the coordinator's node, leads both, and a commit needs a
      message from every rank of its generation. (One exception: on a node's own disk, its first rank may delete.)
    - They cannot corrupt a checkpoint: files are only created, never overwritten, under names unique to a generation.
    """
    failure = decision.known_failure
    _exclude_nodes(decision, roster)
    moves, why = roster.replace_nodes()
    for move in moves:
        name, left = roster.members[move.node].name, roster.members[move.instead]
        about = {"reason": left.excluded or failure.reason, "kind": str(_replacement_cause(left, failure))}
        about |= {"drill": drill} if drill else {}
        events.write(EventKind.SPARE_USED, node=move.node, name=name, instead=left.name, **about)
    return None if moves else in_job_policy.end(f"{decision.reason}; {why}", failure)


def _replacement_cause(left: Member, failure: Failure) -> FailureKind:
    if left.name in failure.nodes:
        return failure.kind
    return FailureKind.AGENT_LOST if left.lost else FailureKind.NODE_SUSPECT


def _exclude_nodes(decision: Decision, roster: Roster) -> None:
    """Exclude the replaced nodes from training, even if their agents still answer."""
    failure = decision.known_failure
    for name in _replaced_nodes(decision):
        if failure.kind is not FailureKind.AGENT_LOST and (node := roster.find_node(name)) is not None:
            roster.members[node].excluded = failure.reason


def _replaced_nodes(decision: Decision) -> tuple[str, ...]:
    return decision.lost or (decision.failure.nodes if decision.failure is not None else ())


def left_behind(decision: Decision) -> tuple[str, ...]:
    """Return nodes whose ranks may outlive the start of the next generation, or an empty tuple if all nodes continue.
    A hung driver or disk may keep a rank from dying, which is why its node is given up.
    """
    return _replaced_nodes(decision) if decision.action is Action.REPLACE else ()


def replace_unkillable_nodes(
    decision: Decision, roster: Roster, generation: int, *, seconds: float, stopping: bool
) -> Decision:
    """Return the replacement for `decision` if ranks of this generation could not be killed within `seconds`.
    A node with an unkillable rank must not train, whatever the reason for the kill.
    """
    stuck = [
        one for one in roster.training_members() if one.gone < generation and one.name not in left_behind(decision)
    ]
    if decision.action is Action.REPLACE:
        _exclude_nodes(decision, roster)
    for member in stuck:
        member.excluded = f"{member.name}: its ranks could not be killed within {seconds:.0f} s"
    failure = Failure(
        kind=FailureKind.NODE_SUSPECT, reason="; ".join(member.excluded for member in stuck), node=stuck[0].name,
        step=decision.known_failure.step,
    )  # fmt: skip
    reason = f"{decision.reason}; {failure.reason}"
    return Decision(action=Action.END if stopping else Action.REPLACE, reason=reason, failure=failure)


def can_replace(decision: Decision | None, roster: Roster) -> bool:
    """Return whether a single node caused this end between two generations, and spares are left."""
    if decision is None or decision.action is not Action.END or decision.failure is None or not roster.spares():
        return False
    # A program that no node can import will not load on a spare either.
    if decision.failure.kind is FailureKind.USER_ERROR:
        return False
    node = roster.find_node(decision.failure.node)
    return decision.failure.kind is FailureKind.AGENT_LOST or (node is not None and bool(roster.members[node].excluded))
