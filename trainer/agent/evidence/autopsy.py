"""What the flight records of dead ranks say: gloo ends ranks at once when collectives differ, and nobody hangs."""

from collections.abc import Sequence

from trainer.agent.flight.analysis import Finding, analyse
from trainer.agent.flight.recorder import of_the_dying
from trainer.agent.watch.blame import RankEnd, doubt
from trainer.agent.watch.hangs import Judgement, Stall, Verdict
from trainer.contract.run_dir import AttemptDir


def is_due(ends: Sequence[RankEnd]) -> bool:
    """Whether nobody among these explains himself: all were aborted, or say that a peer went away."""
    bad = [end for end in ends if not end.good]
    return bool(bad) and all(doubt(end) > 0 for end in bad)


def of_the_dead(attempt: AttemptDir, generation: int, world: int) -> Finding | None:
    """What the records that a generation left say together; None when it left none. Reads the shared file system."""
    found = of_the_dying(attempt, generation)
    if not found:
        return None
    unanswered = sorted(set(range(world)) - {flight.rank for flight in found})
    return analyse(found, range(world), unanswered)


def of_desync(finding: Finding, ends: Sequence[RankEnd]) -> Judgement | None:
    """The judgement on ranks that called different collectives; None when that is not what the records say."""
    if not finding.kind.startswith("desync"):
        return None
    rank = finding.ranks[0] if finding.ranks else None
    end = next((end for end in ends if end.rank == rank), None)
    return Judgement(
        verdict=Verdict.HUNG,
        reason=finding.reason,
        culprit=rank,
        node=None if end is None else end.node,
        step=0 if end is None else end.step or 0,
        kind=Stall.DESYNC,
        waiting=tuple(end.rank for end in ends if end.rank != rank),
    )
