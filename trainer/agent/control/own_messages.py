"""What the coordinator puts into its own inbox; it never crosses a connection."""

from dataclasses import dataclass

from trainer.contract.messages.agents import FromAgent
from trainer.contract.requests import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentJoined:
    """An agent was admitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentLost:
    """The connection to an agent has ended."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRefused:
    """An agent of another protocol wanted to join."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A second has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fenced:
    """The attempt's launch token was revoked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFound:
    """There is a request in the run directory."""

    request: Request


InboxMessage = FromAgent | AgentJoined | AgentLost | AgentRefused | Tick | Fenced | RequestFound
