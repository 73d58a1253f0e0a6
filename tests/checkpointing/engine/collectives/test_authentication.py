"""A message counts for one sender, receiver, exchange and generation only."""

from collections.abc import Callable

import pytest

from checkpointing.engine.collectives.group import RankGroup, UnauthenticatedPeer

KEY = b"k" * 32


def ranks(key: bytes = KEY) -> RankGroup:
    return RankGroup(None, key=key)


def test_a_message_of_this_exchange_is_taken() -> None:
    sender, receiver = ranks(), ranks()
    message = sender._next_message({"a": 1}, to=3)
    receiver._nothing()
    assert receiver._verify(bytearray(message), 0, 3) == {"a": 1}


FORGERIES: dict[str, Callable[[RankGroup, bytearray], object]] = {
    "another sender": lambda receiver, message: receiver._verify(message, 1, 3),
    "another receiver": lambda receiver, message: receiver._verify(message, 0, 2),
    "to all": lambda receiver, message: receiver._verify(message, 0, -1),
    "sent again": lambda receiver, message: (receiver._nothing(), receiver._verify(message, 0, 3)),
    "another group": lambda receiver, message: (setattr(receiver, "_name", "9"), receiver._verify(message, 0, 3)),
    "changed": lambda receiver, message: receiver._verify(message[:-1] + b"}", 0, 3),
    "cut": lambda receiver, message: receiver._verify(message[:-1], 0, 3),
    "without a tag": lambda receiver, message: receiver._verify(message[32:], 0, 3),
    "empty": lambda receiver, message: receiver._verify(bytearray(), 0, 3),
    "another generation": lambda receiver, message: (
        setattr(receiver, "_key", b"l" * 32),
        receiver._verify(message, 0, 3),
    ),
}


@pytest.mark.parametrize("forged", FORGERIES.values(), ids=FORGERIES)
def test_any_other_is_refused(forged: Callable[[RankGroup, bytearray], object]) -> None:
    sender, receiver = ranks(), ranks()
    message = bytearray(sender._next_message([1], to=3))
    receiver._nothing()
    with pytest.raises(UnauthenticatedPeer, match="is not authenticated by this generation's key"):
        forged(receiver, message)
