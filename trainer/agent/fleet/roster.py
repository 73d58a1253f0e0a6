"""The agents of the job as the coordinator knows them."""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from trainer.agent.control import speech
from trainer.agent.control.wire import Message, Peer, WireError
from trainer.agent.fleet.preflight import Fault
from trainer.agent.fleet.seats import Move, Seats, replacements, seating

SILENCE_SECONDS = 60.0
"""An agent (or coordinator) that says nothing for so long is lost; it speaks twice a second when it lives."""
STANDING_SECONDS = 10.0
"""The same while no rank of the job moves, as when a node has gone from the network: its peers wait for it."""
RETURN_SECONDS = 5.0
"""An agent that goes before it has said anything may be about to say hello again: it was not let in soon enough."""

LATE_SECONDS = 3.0
"""A look that was due so long ago tells that the coordinator itself had no time: it was suspended, or starved."""
LOOK_SECONDS = 1.0


@dataclass(kw_only=True)
class Member:
    """One agent that has joined."""

    node: int
    name: str
    peer: Peer
    heard: float
    spoken: bool = False  # it has said more than hello
    faults: list[Fault] | None = None
    ready: bool = False
    gone: int = 0  # newest generation of which nothing is left on this node
    lost: str = ""  # why it is lost
    machine: str = ""  # identity of the machine it runs on, where that is known
    ahead: float = 0.0  # seconds by which its clock is ahead of the coordinator's, the wire's delay included
    unfit: str = ""  # why its node must not train, though it answers
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        return not self.lost and not self.unfit


class Roster:
    """Who has joined; turns connections into messages for the coordinator's inbox."""

    def __init__(
        self, nodes: int, attempt: int, deliver: Callable[[int, Message], None], *, seats: int | None = None
    ) -> None:
        """`seats`: how many of the nodes train; the others are spares."""
        self._nodes, self._attempt, self._deliver = nodes, attempt, deliver
        self._wanted = nodes if seats is None else seats
        self._sat = False
        self._ticked: float | None = None
        self._moved: float | None = None  # when a rank moved last; nothing was started yet
        self.members: dict[int, Member] = {}
        self.seats: Seats = {seat: seat for seat in range(self._wanted)}  # until all are examined

    def admit(self, hello: Message, peer: Peer) -> bool:
        """Whether this authenticated agent may join: one for each node of this attempt."""
        node, name = hello.get("node"), hello.get("name")
        known = type(node) is int and 0 <= node < self._nodes and isinstance(name, str)
        if not known or hello.get("attempt") != self._attempt:
            return False
        assert isinstance(node, int)
        assert isinstance(name, str)
        member = self.members.get(node)
        if member is None:
            self.members[node] = Member(node=node, name=name, peer=peer, heard=time.monotonic())
            self._deliver(node, {"say": "joined"})
            return True
        if member.spoken or member.lost:
            return False
        # Its agent has waited in vain for the welcome, and says hello again.
        member.peer.drop()
        member.peer, member.name, member.heard = peer, name, time.monotonic()
        return True

    async def serve(self, hello: Message, peer: Peer) -> None:
        """Deliver the messages of one agent until it is gone."""
        member = self.members[hello["node"]]
        reason = "its connection ended"
        try:
            broken = await self._hear(member, peer)
            if not broken and not member.spoken:
                await asyncio.sleep(RETURN_SECONDS)
            reason = broken or reason
        finally:
            if member.peer is peer:
                self._deliver(member.node, {"say": "lost", "reason": reason})

    async def _hear(self, member: Member, peer: Peer) -> str:
        """Until the connection ends; why it cannot go on when what it brings cannot be read."""
        try:
            while (message := await peer.receive()) is not None and member.peer is peer:
                speech.check(message)
                self._note(member, message, time.monotonic())
                self._deliver(member.node, message)
        except WireError as error:
            return f"it sent {error}"
        return ""

    def _note(self, member: Member, message: Message, now: float) -> None:
        """It has spoken; a report that differs from the one before tells that ranks of it move."""
        member.heard, member.spoken = now, True
        if message["say"] == "progress" and any(
            message.get(key) != member.progress.get(key) for key in ("generation", "step", "phase")
        ):
            self._moved = now

    def examined(self, node: int, faults: list[Fault], message: Message, wall: float) -> None:
        """An agent has looked at its own node; `wall` is the time of day here. Raises TypeError or ValueError."""
        member = self.members[node]
        member.faults, member.machine = faults, str(message.get("machine", ""))
        member.ahead = float(message.get("wall", wall)) - wall

    def present(self) -> list[Member]:
        return [member for member in self.members.values() if not member.lost]

    def seated(self) -> list[Member]:
        """Those who train and are there, by seat."""
        found = (self.members.get(node) for _, node in sorted(self.seats.items()))
        return [member for member in found if member is not None and not member.lost]

    def spares(self) -> list[Member]:
        """Those who could take a seat."""
        sitting = set(self.seats.values())
        return [member for member in self._fit() if member.node not in sitting]

    def _fit(self) -> list[Member]:
        """Those who can be relied on: they have been examined and nothing was found."""
        return [member for member in self.members.values() if member.usable and member.faults == []]

    def enough(self) -> bool:
        """Whether as many nodes have joined as are needed, the leader among them."""
        return seating(self._wanted, [member.node for member in self.present()])[0] is not None

    def can_train(self) -> bool:
        """Whether enough fit nodes are there for all seats, the leader among them."""
        return seating(self._wanted, [member.node for member in self._fit()])[0] is not None

    def could_train(self) -> bool:
        """The same, if all that is still to be heard were good."""
        gone = {node for node, member in self.members.items() if not member.usable or member.faults}
        return seating(self._wanted, set(range(self._nodes)) - gone)[0] is not None

    def sit(self) -> str:
        """Give out the seats, if there are nodes enough, and tell who has one; returns how that went."""
        seats, reason = seating(self._wanted, [member.node for member in self._fit()])
        if seats is None:
            return reason
        self.seats, self._sat = seats, True
        for seat, node in sorted(seats.items()):
            self.members[node].peer.send("seat", seat=seat)
        return reason

    def reseat(self) -> tuple[tuple[Move, ...], str]:
        """Let spares take the seats of nodes that are lost or unfit; no moves, and why, when there is no such way."""
        fit = [member.node for member in self._fit()]
        moves, reason = replacements(self.seats, fit, [node for node in fit if self.members[node].ready])
        for move in moves:
            self.seats[move.seat] = move.node
            self.members[move.node].peer.send("seat", seat=move.seat)
        return moves, reason

    def is_needed(self, node: int) -> bool:
        """Whether the job cannot go on as it is when this node is lost."""
        return node in self.seats.values() if self._sat else not self.could_train()

    def node_of(self, name: str | None) -> int | None:
        """The node of this name among those that are there."""
        return next((member.node for member in self.present() if member.name == name), None)

    def missing(self) -> list[int]:
        """Nodes whose agent has never joined."""
        return [node for node in range(self._nodes) if node not in self.members]

    def complete(self) -> bool:
        return not self.missing()

    def all_examined(self) -> bool:
        """Whether all who have joined have been examined."""
        return all(member.faults is not None for member in self.present())

    def unexamined(self) -> list[str]:
        return [member.name for member in self.present() if member.faults is None]

    def unready(self) -> list[str]:
        return [member.name for member in self.seated() if not member.ready]

    def all_ready(self) -> bool:
        """Whether every seat has a nursery that can start ranks."""
        return len(self.seated()) == len(self.seats) and all(member.ready for member in self.seated())

    def all_gone(self, generation: int, *, but: Collection[str] = ()) -> bool:
        """Whether nothing of this generation is left on any node that had a seat and still answers.

        `but`: of these nodes it does not matter.
        """
        seated = (self.members.get(node) for node in self.seats.values())
        sitting = [member for member in seated if member is None or member.name not in but]
        return all(member.gone >= generation for member in sitting if member is not None and not member.lost)

    def ticked(self, now: float) -> None:
        """Once a second. After a pause of the coordinator itself all begin anew: the whole job may have had it."""
        if self._ticked is not None and now - self._ticked > LOOK_SECONDS + LATE_SECONDS:
            for member in self.members.values():
                member.heard = now
            self._moved = None if self._moved is None else now
        self._ticked = now

    def silent(self, now: float) -> tuple[Member, str] | None:
        """An agent that should have spoken long ago, and for how long it has not; sooner when nothing moves."""
        # Measured by the last word of any agent: a coordinator that was stopped itself must not take all for lost.
        latest = min(now, max((member.heard for member in self.present()), default=now))
        standing = self._moved is not None and now - self._moved > STANDING_SECONDS
        patience = STANDING_SECONDS if standing else SILENCE_SECONDS
        quiet = next((member for member in self.present() if latest - member.heard > patience), None)
        if quiet is None:
            return None
        also = " while no rank moved" if standing else ""
        return quiet, f"it has been silent for {now - quiet.heard:.0f} s{also}"

    def tell(self, say: str, **fields: Any) -> None:
        """Send one message to every agent that is there."""
        for member in self.present():
            member.peer.send(say, **fields)

    def start(self, **fields: Any) -> None:
        """Tell everyone who has a seat to start its ranks."""
        self._moved = time.monotonic()
        for seat, node in self.seats.items():
            if not self.members[node].lost:
                self.members[node].peer.send("start", seat=seat, **fields)

    def names(self) -> list[str]:
        """Of all nodes that have joined: those with a seat in its order, then the others that are still there."""
        order = [node for _, node in sorted(self.seats.items())]
        order += sorted({member.node for member in self.present()} - set(order))
        return [self.members[node].name for node in order if node in self.members]

    async def empty(self, seconds: float) -> None:
        """Wait until every agent has hung up, but not longer than `seconds`."""
        give_up = time.monotonic() + seconds
        while any(not member.peer.hung_up() for member in self.present()) and time.monotonic() < give_up:
            await asyncio.sleep(0.01)
