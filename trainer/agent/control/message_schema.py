"""PURE: what an agent may send, and the type of each key, so that a stored message cannot break a later reader."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from trainer.agent.control.tcp_transport import Message, WireError

_OWN = frozenset({"joined", "lost", "tick", "fenced", "request"})
"""Messages of the coordinator to itself."""

_LONGEST_ROWS = 4096
"""Rows in one message: a few for each rank of a node."""

Check = Callable[[Any], bool]


def check(message: Message) -> None:
    """Raises WireError when no agent may send this; unknown keys are left to the handler of the message."""
    say = message["say"]
    if say in _OWN:
        raise WireError(f"{say!r}, which no agent may say")
    for key, fits in _WORDS.items():
        if key in message and not fits(message[key]):
            raise WireError(f"a {say!r} whose {key} is {_short(message[key])}")


def _is(*types: type) -> Check:
    """Of exactly one of these types: True is no number."""
    allowed = frozenset(types)
    return lambda value: type(value) in allowed


def _row(*types: frozenset[type]) -> Check:
    allowed = frozenset(product(*types))  # one look-up for a row: a large job reports thousands a second
    return lambda row: type(row) is list and tuple(map(type, row)) in allowed


def _rows(fits: Check) -> Check:
    return lambda value: type(value) is list and len(value) <= _LONGEST_ROWS and all(map(fits, value))


def _by_name(fits: Check) -> Check:
    return lambda value: isinstance(value, Mapping) and len(value) <= _LONGEST_ROWS and all(map(fits, value.values()))


_INT, _TEXT, _BOOL = frozenset({int}), frozenset({str}), frozenset({bool})
_NUMBER = frozenset({int, float})
_int, _text, _bool, _number = _is(int), _is(str), _is(bool), _is(int, float)
_maybe_int, _maybe_text = _is(int, type(None)), _is(str, type(None))
_RANK_SAMPLE_ROW = _row(_INT, _INT, _TEXT, _BOOL, _INT, _NUMBER, _NUMBER, _TEXT, _NUMBER, _BOOL)

_WORDS: dict[str, Check] = {
    **dict.fromkeys(("generation", "rank", "step", "saved", "total", "restored"), _int),
    **dict.fromkeys(("port", "serial", "written", "size"), _int),
    **dict.fromkeys(("exit_code", "signal", "position"), _maybe_int),
    **dict.fromkeys(("exception", "message"), _maybe_text),
    **dict.fromkeys(("save_seconds", "step_seconds", "wall", "matmul", "memory"), _number),
    **dict.fromkeys(("reason", "phase", "host", "key", "name", "incident", "machine"), _text),
    **dict.fromkeys(("warm", "stepped", "reported", "last", "fit"), _bool),
    "loss": _is(int, float, str, type(None)),
    "faults": _rows(_by_name(_is(str, bool))),
    "sightings": _rows(_RANK_SAMPLE_ROW),
    "work": _rows(_rows(_int)),
    "flights": _rows(_text),
    "lines": _rows(_text),
    "unanswered": _rows(_int),
    "p99": _by_name(_number),
}
"""By key; a key means the same in every message."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
