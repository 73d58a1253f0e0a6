"""What the flight records of dead ranks say: gloo ends ranks at once when collectives differ, so that none hangs."""

from collections.abc import Sequence

from trainer.agent.flight.analysis import Finding, analyse
from trainer.agent.flight.recorder import records_of_dead_ranks
from trainer.agent.watch.hangs import Judgement, Stall, Verdict
from trainer.agent.watch.root_cause import RankEnd, secondary_order
from trainer.contract.run_dir import AttemptDir


def is_needed(ends: Sequence[RankEnd]) -> bool:
    """Whether none of these exits explains itself: all were aborted, or report that a peer went away."""
    bad = [end for end in ends if not end.good]
    return bool(bad) and all(secondary_order(end) > 0 for end in bad)


def analyse_dead_ranks(attempt: AttemptDir, generation: int, world: int) -> Finding | None:
    """What the records that a generation left say together; None when it left none. Reads the shared file system."""
    found = records_of_dead_ranks(attempt, generation)
    if not found:
        return None
    unanswered = sorted(set(range(world)) - {flight.rank for flight in found})
    return analyse(found, range(world), unanswered)


def desync_judgement(finding: Finding, ends: Sequence[RankEnd]) -> Judgement | None:
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
