"""What the status of a run reports of its code."""

from orchestrator.registry.records import Attempt
from orchestrator.registry.store import Store
from trainer.contract.events import EventKind


def code_note(store: Store, attempt: Attempt) -> str:
    """That an attempt trains other code than before, unless a person has accepted it; empty otherwise."""
    changes = [
        notice
        for notice in store.notices(attempt.run)
        if notice.kind == EventKind.CODE_CHANGED and notice.attempt == attempt.number
    ]
    if not changes or changes[-1].data.get("accepted"):
        return ""
    return f"trains other code: {changes[-1].data.get('reason')}"
