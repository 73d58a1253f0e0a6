"""A roster whose agents only record the messages sent to them."""

from typing import Any

from trainer.agent.nodes.roster import Member, Roster


class FakePeer:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def make_roster(nodes: int = 3, node_ranks: int = 2, **members: Any) -> Roster:
    """All agents have joined, are fit and ready, except for the fields given as `nN`."""
    made = Roster(nodes, 1, lambda *_: None, node_ranks=node_ranks)
    for node in range(nodes):
        fields = {"faults": [], "ready": True, "last_message_at": 0.0, **members.get(f"n{node}", {})}
        made.members[node] = Member(node=node, name=f"n{node}", peer=FakePeer(), **fields)  # type: ignore[arg-type]
    return made
