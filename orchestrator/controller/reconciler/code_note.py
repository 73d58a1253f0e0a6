"""The note about changed code in the status of a run."""

from orchestrator.registry.records import Attempt
from orchestrator.registry.store import Store
from trainer.contract.events import EventKind


def code_note(store: Store, attempt: Attempt) -> str:
    """Return a note if an attempt trains changed code that the user has not accepted, else an empty string."""
    changes = [
        notice
        for notice in store.notices(attempt.run)
        if notice.kind == EventKind.CODE_CHANGED and notice.attempt == attempt.number
    ]
    if not changes or changes[-1].data.get("accepted"):
        return ""
    return f"trains other code: {changes[-1].data.get('reason')}"
