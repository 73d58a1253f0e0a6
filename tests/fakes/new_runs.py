"""Runs in a registry that were never submitted."""

from pathlib import Path
from typing import Any

from orchestrator.registry.records import Attempt, NewRun, Run
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
