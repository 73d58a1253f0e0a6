"""Messages between ranks come back unchanged, and malformed ones are refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpointing.engine.collectives.group import Failed, RankGroup, UnauthenticatedPeer
from checkpointing.engine.restore.restorer import Candidate
from checkpointing.engine.save.transfer import Route
from checkpointing.engine.state.layout import Item, Share
from checkpointing.engine.state.plausibility import InspectionReport
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import FileEntry, Manifest, Piece
from checkpointing.format.read_plan import Strip
from checkpointing.message_codec import InvalidMessage, decode, encode

MANIFEST = Manifest(
    name="step-00000001.001-ab", step=1, attempt=1, nonce="ab", created_at=0.1, torch=torch.__version__,
    world={"ranks": 2}, files=(FileEntry(name="a", size=1, chunks=("0" * 32,)),), extra={"loss": 0.1 + 0.2},
)  # fmt: skip
PIECE = Piece("w", "a", (0,), (2,), 0, 8, 0, 8)
VALUES: list[Any] = [
    None, True, 0, -(1 << 70), 0.1 + 0.2, -0.0, 5e-324, math.inf, -math.inf, "", "ä\udc80\n", b"\x00\xff", [], [1, [2]],
    (), (1, (None, "x")), {}, {"tuple": [1]}, {("file", 3): 4, 5: {6: 7}}, frozenset({"a"}), torch.bfloat16,
    Failed("disk full", fenced=True), InspectionReport(b"\x01", (("w", 2),), b"\x02"),
    [("a", [Strip(0, 1, 2, 3)])], Candidate(3, "step", -1), {Candidate(3, "step", -1)}, Route(0, 1, MANIFEST),
    Item(Share("w", torch.float16, (2,), (0,), (4,), (0,)), 4096, PIECE), (MANIFEST, None),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert isinstance(value, set) or repr(found) == repr(value)  # of sets, only frozen ones are made


def test_nan_and_a_refusal_come_back() -> None:
    assert math.isnan(decode(encode(float("nan"))))
    found = decode(encode(CheckpointRefused("step-1", "torn", damaged=False)))
    assert (type(found), found.name, found.reason, found.damaged) == (CheckpointRefused, "step-1", "torn", False)


@pytest.mark.parametrize(
    "message",
    [
        b"", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04N.", b"NaN", b"[1", b"[" * 100_000, b"\xff", b"{}",
        b'{"tuple":[1],"dict":[]}', b'{"os.system":["true"]}', b'{"object":[]}', b'{"Failed":["x"]}',
        b'{"Failed":[1,false,false,false,false,false]}', b'{"Failed":{"reason":"x"}}', b'{"dtype":"load"}',
        b'{"dtype":"float99"}', b'{"float":"1"}', b'{"bytes":"%%"}', b'{"dict":[[[],1]]}',
        b'{"FileEntry":["../../x",1,{"tuple":[]},4]}',
        b'{"Candidate":["1","x",0,false]}',
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(message: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode(message)


def test_unregistered_types_are_not_sent() -> None:
    with pytest.raises(InvalidMessage, match="cannot send a function"):
        encode([print.__class__, lambda: None][1:])


KEY = b"k" * 32


def ranks(key: bytes = KEY) -> RankGroup:
    return RankGroup(None, key=key)


def test_a_message_of_this_exchange_is_accepted() -> None:
    sender, receiver = ranks(), ranks()
    message = sender._next_message({"a": 1}, to=3)
    receiver._next_message(None, to=0)
    assert receiver._verify(bytearray(message), 0, 3) == {"a": 1}


FORGERIES: dict[str, Callable[[RankGroup, bytearray], object]] = {
    "another sender": lambda receiver, message: receiver._verify(message, 1, 3),
    "another receiver": lambda receiver, message: receiver._verify(message, 0, 2),
    "to all": lambda receiver, message: receiver._verify(message, 0, -1),
    "sent again": lambda receiver, message: (receiver._next_message(None, to=0), receiver._verify(message, 0, 3)),
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
def test_a_forged_or_replayed_message_is_refused(forged: Callable[[RankGroup, bytearray], object]) -> None:
    sender, receiver = ranks(), ranks()
    message = bytearray(sender._next_message([1], to=3))
    receiver._next_message(None, to=0)
    with pytest.raises(UnauthenticatedPeer, match="is not authenticated with this generation's key"):
        forged(receiver, message)
