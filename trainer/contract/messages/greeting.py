"""How an agent and the coordinator greet: they go on only if both speak the same protocol.

Whatever changes elsewhere, the fields that stand here keep their names and types: so versions can refuse each other.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from trainer.contract.messages.codec import Direction

PROTOCOL = 2
"""Counts up with every change of the messages but new fields that have a default; 0: a process that tells none."""


@cache
def installed_release() -> str:
    """The release of orch that this process runs; empty where it is not installed."""
    try:
        return version("orch")
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge:
    """What the coordinator says first to everybody who connects."""

    nonce: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The answer to a challenge: which agent of which attempt asks to join."""

    nonce: str = ""  # of the agent's own making
    protocol: int = 0
    release: str = ""
    node: int = -1
    name: str = ""
    attempt: int = 0
    switches: tuple[str, ...] = ()  # that lead to the agent's node, the top one first


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The agent has joined."""

    protocol: int = 0
    release: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The agent may not join."""

    reason: str
    protocol: int = 0
    release: str = ""


HELLO = Direction[Hello](Hello)
CHALLENGE = Direction[Challenge](Challenge)
ANSWER = Direction[Welcome | Refused](Welcome, Refused)


def why_foreign(agent: Hello, coordinator: Welcome | Refused) -> str:
    """Why the two cannot work together, by what they say of themselves, and what to do; empty: they can."""
    if agent.protocol == coordinator.protocol:
        return ""
    return (
        f"this agent speaks protocol {_spoken(agent)}, the coordinator {_spoken(coordinator)}: "
        "all nodes must start the same installation of orch"
    )


def _spoken(one: Hello | Welcome | Refused) -> str:
    return f"{one.protocol} (orch {one.release or 'of an unknown release'})"
