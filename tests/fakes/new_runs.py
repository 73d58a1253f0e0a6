"""Runs and leases in a registry."""

from pathlib import Path
from typing import Any

from orchestrator.registry.records import Attempt, Lease, NewRun, Run
from orchestrator.registry.store import Store


def create_run(
    store: Store, root: Path, data: dict[str, Any] | None = None, *, now: float = 0.0, nonce: str = "00000001",
    **fields: Any,
) -> tuple[Run, Attempt]:  # fmt: skip
    """Create a Slurm run with this config; `fields` replace those of the new run."""
    if data is not None:
        fields["config_digest"] = store.put_config(data)
    known = {"slug": "sim", "cluster": "slurm", "total_steps": 1, "identity": {}}
    return store.create_run(NewRun(root=root, **{**known, **fields}), now=now, nonce=nonce)


def take_lease(store: Store, holder: str, now: float, ttl: float, *scheduler: str, **over: Any) -> Lease:
    """Take a lease that is free."""
    lease = store.take_lease(holder, now, ttl, *scheduler, **over)
    assert lease is not None
    return lease
