"""The record of a run with which another registry has gone on."""

from dataclasses import replace
from pathlib import Path

from orchestrator.registry.run_record import load_record
from orchestrator.registry.store import Store
from trainer.protocol.run_dir import RunDir


def record_newer_attempt(store: Store, run: str, registry: Path) -> None:
    """Leave the record in the run's folder as `registry` would: with one attempt more than `store` knows."""
    record = load_record(store, run)
    last = record.attempts[-1]
    newer = replace(last, number=last.number + 1, nonce="bbbbbbbb", job_id="8")
    record = replace(record, attempts=(*record.attempts, newer), registry=str(registry))
    RunDir(Path(record.run.run_dir)).record.write_bytes(record.encode())
