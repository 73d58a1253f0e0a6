"""The agents of the job as the coordinator knows them."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer.agent.preflight import Fault
from trainer.agent.wire import Message, Peer, WireError

SILENCE_SECONDS = 60.0
"""An agent (or coordinator) that says nothing for so long is lost; it speaks twice a second when it lives."""


@dataclass(kw_only=True)
class Member:
    """One agent that has joined."""

    node: int
    name: str
    peer: Peer
    heard: float
    faults: list[Fault] | None = None
    ready: bool = False
    gone: int = 0  # newest generation of which nothing is left on this node
    lost: str = ""  # why it is lost
    progress: dict[str, Any] = field(default_factory=dict)


class Roster:
    """Who has joined; turns connections into messages for the coordinator's inbox."""

    def __init__(self, nodes: int, attempt: int, deliver: Callable[[int, Message], None]) -> None:
        self._nodes, self._attempt, self._deliver = nodes, attempt, deliver
        self.members: dict[int, Member] = {}

    def admit(self, hello: Message, peer: Peer) -> bool:
        """Whether this authenticated agent may join: one for each node of this attempt."""
        node, name = hello.get("node"), hello.get("name")
        known = type(node) is int and 0 <= node < self._nodes and node not in self.members and isinstance(name, str)
        if not known or hello.get("attempt") != self._attempt:
            return False
        assert isinstance(node, int)
        assert isinstance(name, str)
        self.members[node] = Member(node=node, name=name, peer=peer, heard=time.monotonic())
        return True

    async def serve(self, hello: Message, peer: Peer) -> None:
        """Deliver the messages of one agent until it is gone."""
        node = hello["node"]
        self._deliver(node, {"say": "joined"})
        reason = "its connection ended"
        try:
            while (message := await peer.receive()) is not None:
                self.members[node].heard = time.monotonic()
                self._deliver(node, message)
        except WireError as error:
            reason = f"it sent {error}"
        finally:
            self._deliver(node, {"say": "lost", "reason": reason})

    def present(self) -> list[Member]:
        return [member for member in self.members.values() if not member.lost]

    def missing(self) -> list[int]:
        """Nodes whose agent has never joined."""
        return [node for node in range(self._nodes) if node not in self.members]

    def complete(self) -> bool:
        return not self.missing()

    def all_examined(self) -> bool:
        return self.complete() and all(member.faults is not None for member in self.present())

    def unexamined(self) -> list[str]:
        return [member.name for member in self.present() if member.faults is None]

    def unready(self) -> list[str]:
        return [member.name for member in self.present() if not member.ready]

    def all_ready(self) -> bool:
        return self.complete() and all(member.ready for member in self.present())

    def all_gone(self, generation: int) -> bool:
        """Whether nothing of this generation is left on any node that still answers."""
        return all(member.gone >= generation for member in self.present())

    def silent(self, now: float) -> Member | None:
        """An agent that should have spoken long ago."""
        return next((member for member in self.present() if now - member.heard > SILENCE_SECONDS), None)

    def tell(self, say: str, **fields: Any) -> None:
        """Send one message to every agent that is there."""
        for member in self.present():
            member.peer.send(say, **fields)

    def names(self) -> list[str]:
        return [self.members[node].name for node in sorted(self.members)]

    async def empty(self, seconds: float) -> None:
        """Wait until every agent has hung up, but not longer than `seconds`."""
        give_up = time.monotonic() + seconds
        while any(not member.peer.hung_up() for member in self.present()) and time.monotonic() < give_up:
            await asyncio.sleep(0.01)
