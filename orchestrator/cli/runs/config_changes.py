"""What people have changed of a run's configuration since it was submitted, attempt by attempt."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from orchestrator.config.compose import diff
from orchestrator.config.redaction import redacted_value
from orchestrator.registry.records import Attempt, Run
from orchestrator.registry.store import Store


def config_changes(store: Store, run: Run, attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Each changed key with the first attempt that has it; the last one may not have begun yet."""
    # An attempt that an older orch has begun has no config of its own.
    digests = [(attempt.number, attempt.base_digest or run.config_digest) for attempt in attempts]
    digests.append((len(attempts) + 1, run.config_digest))
    return [
        {
            "attempt": number,
            "key": key,
            "before": redacted_value(key, before),
            "now": redacted_value(key, now),
        }  # fmt: skip
        for (_, old), (number, new) in pairwise(digests)
        if old != new
        for key, (before, now) in diff(store.config(old), store.config(new)).items()
    ]
