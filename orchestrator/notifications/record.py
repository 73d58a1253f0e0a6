"""What the registry keeps of a run's notifications, so that a change is told once, whichever controller lives."""

from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.contract.config import build

MOST_WAITING = 8
"""Messages of one run that wait for another try; of more, the oldest is given up."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """One message after its newest try: the change of state with number `index`, counted from the run's first one."""

    index: int
    state: str
    at: float = 0.0  # seconds since the epoch: of the newest try
    tries: int = 0
    next_at: float = 0.0  # of the next try; 0: there is none
    delivered: tuple[str, ...] = ()  # channels
    failed: dict[str, str] = field(default_factory=dict)  # by channel, why

    @property
    def trouble(self) -> str:
        """Why it has not reached everybody; empty when it has."""
        if not self.failed:
            return ""
        ways = "; ".join(f"{channel}: {why}" for channel, why in sorted(self.failed.items()))
        after = "it is tried again" if self.next_at else f"given up after {self.tries} tries"
        return f"that it is {self.state} could not be told by {ways} ({after})"


@dataclass(frozen=True, kw_only=True)
class Notified:
    """How far a run's changes of state have been told: those before `settled` were sent, or are nobody's business."""

    settled: int = 0
    newest: Told | None = None
    waiting: tuple[Told, ...] = ()  # for another try, oldest first

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Notified":
        """As `to_json` has left it in the run's row."""
        made = build(cls, fields)
        assert isinstance(made, cls)
        return made

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def after(self, told: Told) -> "Notified":
        """The same once a message was tried."""
        others = [one for one in self.waiting if one.index != told.index]
        waiting = sorted([*others, told] if told.next_at else others, key=lambda one: one.index)
        newest = told if self.newest is None or told.index >= self.newest.index else self.newest
        settled = max(self.settled, told.index + 1)
        return Notified(settled=settled, newest=newest, waiting=tuple(waiting[-MOST_WAITING:]))

    @property
    def trouble(self) -> str:
        """Why the newest message that has not reached everybody has not; empty where all have."""
        found = [one.trouble for one in (*self.waiting, self.newest) if one is not None and one.failed]
        return found[-1] if found else ""
