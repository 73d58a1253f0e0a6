"""What becomes of an incident: its event, its verdict.json, and the failure it means for the generation."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, write_durably
from trainer.agent.watch.hang_detector import Incident
from trainer.agent.watch.hangs import Judgement, Stall
from trainer.agent.watch.rank_sample import RankSample
from trainer.contract.failures.outcome import Failure, FailureKind
from trainer.contract.secrets.secret_redaction import in_use

_MOST_WAITING = 64
"""Waiting ranks that an event names; verdict.json names them all."""


def failure_of(judgement: Judgement, evidence: str) -> Failure:
    """What the incident means for the attempt; `evidence` is the bundle's path in the run directory."""
    kind = FailureKind.DESYNC if judgement.kind is Stall.DESYNC else FailureKind.HANG
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
    """The keys of the event; `withdrawn`: the ranks went on while the evidence was collected."""
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
    """Write verdict.json: the judgement, every rank as it was seen, and what could not be collected; raises OSError."""
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
