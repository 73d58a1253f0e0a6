"""Detection of another registry that drives a run. Two controllers would act on one folder without a shared lease."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpointing.storage.durable import only_own_files
from orchestrator.errors import Precondition, RegistryError
from orchestrator.registry import fast_queries
from orchestrator.registry.lease import displayed_state, holder_host
from orchestrator.registry.records import Attempt, Lease, Run
from orchestrator.registry.run_record import RunRecord, is_other_registry
from orchestrator.states import LIVE_RUNS
from trainer.protocol.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class OtherRegistry:
    """Another registry that drives a run."""

    what: str
    hint: str  # command to type


def find_other_registry(run: Run, attempts: Sequence[Attempt], registry: Path) -> OtherRegistry | None:
    """Return the other registry that drives the run according to the run's record; `attempts` are from `registry`.

    Returns None if the record is missing, is damaged or belongs to another run.
    """
    folder = Path(run.run_dir)
    try:
        with only_own_files():
            record = RunRecord.read(RunDir(folder).record)
    except (OSError, ValueError):
        return None
    if not (record.attempts and attempts) or record.attempts[0].nonce != attempts[0].nonce:
        return None
    known = {(attempt.number, attempt.nonce) for attempt in attempts}
    unknown = [attempt.number for attempt in record.attempts if (attempt.number, attempt.nonce) not in known]
    if unknown and is_other_registry(record.registry, registry):
        has = f"attempt{'' if len(unknown) == 1 else 's'} {', '.join(map(str, unknown))}"
        return OtherRegistry(
            what=f"another registry has continued {run.name}: {record.registry} has {has}, unknown to {registry}",
            hint=f"`orch db rebuild --root {folder.parent}` imports that; "
            f"or use the other registry: `export ORCH_REGISTRY={record.registry}`",
        )
    with suppress(OSError):  # this folder may be a copy, with the record of the original
        if os.path.samefile(record.run.run_dir, folder):
            return find_serving_registry(record, registry, time.time())
    return None


def find_serving_registry(record: RunRecord, registry: Path, now: float) -> OtherRegistry | None:
    """Return the other registry whose live controller serves this record's run."""
    run = record.run
    if run.state not in LIVE_RUNS or not is_other_registry(record.registry, registry):
        return None
    for lease in read_leases(Path(record.registry)):
        if lease.scheduler == run.scheduler and displayed_state(lease, now).may_write:
            there = f"ORCH_REGISTRY={record.registry} on {holder_host(lease.holder)}"
            return OtherRegistry(
                what=f"{run.name} is {run.state}, and the controller of another registry serves it: {record.registry}",
                hint=f"`orch controller stop` with {there}, then try again",
            )
    return None


def refuse_other_registry(run: Run, attempts: Sequence[Attempt], registry: Path) -> None:
    """Raise Precondition if another registry drives the run."""
    if (other := find_other_registry(run, attempts, registry)) is not None:
        raise Precondition(other.what, where=run.run_dir, hint=other.hint)


def read_leases(path: Path) -> list[Lease]:
    """Return the leases of a registry; empty if it is gone or unreadable."""
    try:
        return fast_queries.leases(path, any_version=True) if path.exists() else []
    except (OSError, RegistryError):
        return []
