"""What the registry keeps of a run's notifications, so that a change is told once, whichever controller lives."""

from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.contract.config import build


@dataclass(frozen=True, kw_only=True)
class Notified:
    """How far a run's changes of state have been told; `state` and what follows are of the newest one that was tried.

    `settled` counts the run's changes from its first one: those are told, given up, or nobody's business.
    """

    settled: int = 0
    state: str = ""
    at: float = 0.0  # seconds since the epoch: of the newest try
    tries: int = 0
    next_at: float = 0.0  # of the next try; 0: there is none
    delivered: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)  # by channel, why

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Notified":
        """As `to_json` has left it in the run's row."""
        made = build(cls, fields)
        assert isinstance(made, cls)
        return made

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def trouble(self) -> str:
        """Why the newest message has not reached everybody; empty when it has."""
        if not self.failed:
            return ""
        ways = "; ".join(f"{channel}: {why}" for channel, why in sorted(self.failed.items()))
        after = "it is tried again" if self.next_at else f"given up after {self.tries} tries"
        return f"that it is {self.state} could not be told by {ways} ({after})"
