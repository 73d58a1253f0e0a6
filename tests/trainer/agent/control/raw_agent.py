"""An agent's end of a control connection, byte by byte."""

import asyncio
import json
import socket
from typing import Any

from trainer.agent.control.tcp_transport import Seal, hello_seal, new_nonce, session_seals
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import PROTOCOL
from trainer.protocol.messages.codec import encode


async def challenged(connection: socket.socket) -> str:
    """The nonce of the challenge that the listener has sent."""
    connection.setblocking(False)
    received = b""
    while not received.endswith(b"\n"):
        received += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1), 10)
    nonce: str = json.loads(received)["nonce"]
    return nonce


class RawAgent:
    """What an agent would send that has been challenged so; `token` may be a wrong one."""

    def __init__(self, challenge: str, token: str = "secret", **fields: Any) -> None:
        nonce = new_nonce()
        seal = hello_seal(token, challenge)
        self.hello = (
            seal.sign(json.dumps({"say": "hello", "nonce": nonce, "protocol": PROTOCOL, **fields}).encode()) + b"\n"
        )
        self.listeners, self._own = session_seals(token, challenge, nonce)

    def line(self, message: agents.FromAgent) -> bytes:
        """Its next message."""
        return sealed(self._own, message)

    def heard(self, line: bytes) -> dict[str, Any]:
        """The listener's next message; raises TypeError when it carries no valid proof."""
        return dict(json.loads(self.listeners.verify(line.removesuffix(b"\n")) or b"null"))


def sealed(seal: Seal | None, message: agents.FromAgent) -> bytes:
    assert seal is not None
    return seal.sign(encode(message).encode()) + b"\n"
