"""Incidents: their events, verdict.json, and the resulting failure of the generation."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, write_durably
from trainer.agent.flight.analysis import Finding, analyse
from trainer.agent.flight.recorder import records_of_dead_ranks
from trainer.agent.watch.hang_detector import Incident
from trainer.agent.watch.hang_limits import RankSample
from trainer.agent.watch.hangs import HangJudgement, HangKind, HangVerdict
from trainer.agent.watch.root_cause import RankEnd, secondary_order
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.secrets.secret_redaction import in_use


def is_needed(ends: Sequence[RankEnd]) -> bool:
    """Return whether no exit explains itself: each bad one was an abort or reported a lost peer."""
    bad = [end for end in ends if not end.good]
    return bool(bad) and all(secondary_order(end) > 0 for end in bad)


def analyse_dead_ranks(attempt: AttemptDir, generation: int, world: int) -> Finding | None:
    """Return the joint analysis of the flight records left by a generation, or None. Reads the shared file system."""
    found = records_of_dead_ranks(attempt, generation)
    if not found:
        return None
    unanswered = sorted(set(range(world)) - {flight.rank for flight in found})
    return analyse(found, range(world), unanswered)


def desync_judgement(finding: Finding, ends: Sequence[RankEnd]) -> HangJudgement | None:
    """Return the judgement on ranks that called different collectives; None if the records show no desync."""
    if not finding.kind.startswith("desync"):
        return None
    rank = finding.ranks[0] if finding.ranks else None
    end = next((end for end in ends if end.rank == rank), None)
    return HangJudgement(
        verdict=HangVerdict.HUNG,
        reason=finding.reason,
        culprit=rank,
        node=None if end is None else end.node,
        step=0 if end is None else end.step or 0,
        kind=HangKind.DESYNC,
        waiting=tuple(end.rank for end in ends if end.rank != rank),
    )


_MOST_WAITING = 64
"""Maximum number of waiting ranks in an event; verdict.json lists all of them."""


def build_failure(judgement: HangJudgement, evidence: str) -> Failure:
    """Return the failure that the incident means for the attempt. `evidence` is the bundle's path in the run folder."""
    kind = FailureKind.DESYNC if judgement.kind is HangKind.DESYNC else FailureKind.HANG
    return Failure(
        kind=kind,
        reason=judgement.reason,
        rank=judgement.culprit,
        node=judgement.node,
        step=judgement.step,
        evidence=evidence,
        culprits=judgement.culprits[:_MOST_WAITING] if len(judgement.culprits) > 1 else (),
    )


def event_fields(incident: Incident, evidence: str, *, withdrawn: bool) -> dict[str, Any]:
    """Return the fields of the event; `withdrawn`: the ranks continued while evidence was collected."""
    judgement = incident.judgement
    return {
        "name": incident.name,
        "kind": str(judgement.kind),
        "rank": judgement.culprit,
        "node": judgement.node,
        "phase": judgement.phase,
        "step": judgement.step,
        "reason": judgement.reason,
        "waiting": list(judgement.waiting)[:_MOST_WAITING],
        "culprits": [asdict(one) for one in judgement.culprits[:_MOST_WAITING]],
        "chain": judgement.chain,
        "evidence": evidence,
        "detected": incident.quiet,
        "withdrawn": withdrawn,
    }


def write_verdict(bundle: Path, incident: Incident, seen: list[RankSample], *, withdrawn: bool) -> None:
    """Write verdict.json: the judgement, every rank's sample, and missing evidence. Raises OSError."""
    bundle.mkdir(mode=0o700, parents=True, exist_ok=True)
    judgement = incident.judgement
    fields = {
        "schema": "orch.incident/1",
        **event_fields(incident, bundle.name, withdrawn=withdrawn),
        "waiting": list(judgement.waiting),
        "culprits": [asdict(one) for one in judgement.culprits],
        "allowed_seconds": judgement.limit,
        "ranks": [asdict(one) for one in seen],
        "missing": incident.missing,
    }
    shown = in_use().record(dump_line(fields))
    write_durably(bundle / "verdict.json", shown.encode(errors="backslashreplace"))
