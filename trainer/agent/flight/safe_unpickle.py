"""Safe reader of the pickled dumps of NCCL's watchdog; executes nothing in them.
A pickle is a program whose opcodes may import and call anything. This reads the opcodes (`pickletools`) and accepts
only the ones for plain values.
"""

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

MOST = 64 << 20
"""Maximum bytes of a dump."""
_STEPS = 20_000_000
"""Maximum number of opcodes executed."""
_NODES, _DEEPEST = 3_000_000, 50
"""Maximum number of values and nesting depth of a dump; a value referenced twice counts twice."""
_LETTERS = 256 << 20
"""Maximum characters of all strings; shared strings count repeatedly, since a reader copies them."""
_MARK = object()

_VALUES = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE",
})  # fmt: skip
_MAKE: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_LIST": list, "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_NOTHING = frozenset({"PROTO", "FRAME"})


def load(data: bytes) -> Any:
    """Return the content of a pickle of dicts, lists, tuples, strings and numbers; raises ValueError for others."""
    if len(data) > MOST:
        raise ValueError(f"a pickle of {len(data):,} bytes: more than {MOST:,} are not read")
    machine = _Machine()
    try:
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if steps > _STEPS:
                raise ValueError("a pickle of too many steps")
            if opcode.name == "STOP":
                return _check_expansion(machine.result())
            machine.do(opcode.name, argument)
    except (IndexError, KeyError, TypeError, UnicodeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a pickle of plain values: {error!r}") from error
    raise ValueError("a pickle without an end")


def _check_expansion(value: Any) -> Any:
    """Return the value; raises ValueError if it expands hugely: a list containing itself, or repeated references."""
    count, letters, level = 0, 0, [value]
    for _ in range(_DEEPEST):
        count += len(level)
        letters += sum(len(one) for one in level if isinstance(one, str))
        if count > _NODES or letters > _LETTERS:
            raise ValueError("a pickle of too many values")
        inner = [one for one in level if isinstance(one, list | tuple | dict)]
        if not inner:
            return value
        if count + sum(map(len, inner)) > _NODES:
            raise ValueError("a pickle of too many values")
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    raise ValueError("a pickle that is too deep")


class _Machine:
    """Stack of a pickle, for the opcodes that only build plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _MAKE:
            stack.append(_MAKE[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name in _PUT:
            self._memo[int(argument)] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in _GET:
            stack.append(self._memo[int(argument)])
        elif name not in _NOTHING:
            self._gather(name)

    def _gather(self, name: str) -> None:
        match name:
            case "APPEND":
                (value,) = self._pop(1)
                self._top(list).append(value)
            case "APPENDS":
                values = self._to_mark()
                self._top(list).extend(values)
            case "SETITEM":
                values = self._pop(2)
                self._set(values)
            case "SETITEMS":
                self._set(self._to_mark())
            case "LIST":
                self._stack.append(self._to_mark())
            case "TUPLE":
                self._stack.append(tuple(self._to_mark()))
            case "DICT":
                values = self._to_mark()
                self._stack.append({})
                self._set(values)
            case _:
                raise ValueError(f"a pickle that does more than hold plain values: {name}")

    def _set(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise ValueError("a pickle with a key without a value")
        self._top(dict).update(zip(values[::2], values[1::2], strict=True))

    def _pop(self, count: int) -> list[Any]:
        values = self._stack[-count:]
        if len(values) < count or any(value is _MARK for value in values):
            raise ValueError("a pickle that takes more than it has")
        del self._stack[-count:]
        return values

    def _to_mark(self) -> list[Any]:
        at = max(place for place, value in enumerate(self._stack) if value is _MARK)
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _top(self, kind: type = object) -> Any:
        value = self._stack[-1]
        if value is _MARK or not isinstance(value, kind):
            raise ValueError(f"a pickle that takes a {type(value).__name__} for a {kind.__name__}")
        return value

    def result(self) -> Any:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise ValueError("a pickle of not one value")
        return self._stack[0]
