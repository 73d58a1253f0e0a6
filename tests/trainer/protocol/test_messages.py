"""Messages between processes: each is read as it was said, and whatever else is said is refused."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.protocol.messages import agents, ranks
from trainer.protocol.messages.codec import LONGEST_ROWS, Direction, MessageError, encode, parse, wire_name
from trainer.protocol.messages.ranks import TO_FORK_SERVER, StartRank

DIRECTIONS: dict[str, Direction[Any]] = {
    name: value
    for module in (agents, ranks, agents, ranks)
    for name, value in vars(module).items()
    if isinstance(value, Direction)
}
PAIRS = [(direction, one) for direction in DIRECTIONS.values() for one in direction.classes]
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS, float: st.floats(allow_nan=False, allow_infinity=False), str: st.text(st.characters()),
    bool: st.booleans(), NoneType: st.none(),
}  # fmt: skip
EVERYTHING: list[Any] = [True, 7, 0.5, "text", None, [], [[]], [{}], {}, {"a": {}}, [None], {"a": []}]
ROW = [1, 5, "forward", False, 9, 0.25, 0.25, "R", 0.0, False]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unchecked:
    """No message: nothing is known of its field."""

    value: object


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Whatever a field of this type may hold."""
    inner = get_args(annotation)
    if annotation in SCALARS:
        return SCALARS[annotation]
    if get_origin(annotation) in (Union, UnionType):
        return st.one_of(map(values, inner))
    if get_origin(annotation) is tuple:
        return (
            st.lists(values(inner[0]), max_size=3).map(tuple)
            if inner[-1] is Ellipsis
            else st.tuples(*map(values, inner))
        )
    if get_origin(annotation) is dict:
        return st.dictionaries(st.text(max_size=5), values(inner[1]), max_size=3)
    return st.sampled_from(annotation) if issubclass(annotation, Enum) else messages(annotation)


def messages(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: values(annotation) for name, annotation in get_type_hints(kind).items()})


def fits(annotation: Any, value: Any) -> bool:
    """Whether `value`, of JSON, is one of this type: told without the codec."""
    inner = get_args(annotation)
    if annotation in SCALARS:
        return type(value) is annotation or (annotation is float and type(value) is int)
    if get_origin(annotation) in (Union, UnionType):
        return any(fits(one, value) for one in inner)
    if get_origin(annotation) is dict:
        return type(value) is dict and all(fits(inner[1], one) for one in value.values())
    if get_origin(annotation) is tuple and inner[-1] is Ellipsis:
        return type(value) is list and all(fits(inner[0], one) for one in value)
    if is_dataclass(annotation):
        return type(value) is dict and not any(
            one.default is one.default_factory is MISSING for one in fields(annotation)
        )
    return not inner and type(value) is int and value in [one.value for one in annotation]


def made(kind: type) -> dict[str, Any]:
    """The JSON of one message of this class, with all its fields."""
    return {"say": wire_name(kind), **_least(kind)}


def _least(annotation: Any) -> Any:
    inner = get_args(annotation)
    if annotation in SCALARS:
        return {int: 1, float: 0.5, str: "x", bool: True, NoneType: None}[annotation]
    if get_origin(annotation) in (Union, UnionType):
        return _least(inner[0])
    if get_origin(annotation) is tuple:
        return [] if inner[-1] is Ellipsis else [_least(one) for one in inner]
    if get_origin(annotation) is dict:
        return {}
    if issubclass(annotation, Enum):
        return next(iter(annotation)).value
    return {name: _least(one) for name, one in get_type_hints(annotation).items()}


def test_every_message_has_one_name_and_every_class_a_direction() -> None:
    names = [wire_name(one) for _, one in PAIRS]
    by_class = {one for _, one in PAIRS}
    assert len({*names}) == len(by_class)
    for module in (agents, ranks, agents, ranks):
        own = {value for value in vars(module).values() if is_dataclass(value) and value.__module__ == module.__name__}
        nested = {one for kind in by_class for one in _inside(kind)}
        assert own <= by_class | nested


def _inside(kind: type) -> Iterator[type]:
    for annotation in get_type_hints(kind).values():
        for one in (annotation, *get_args(annotation)):
            if is_dataclass(one) and isinstance(one, type):
                yield one


@pytest.mark.parametrize(("direction", "kind"), PAIRS, ids=lambda one: getattr(one, "__name__", ""))
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_message_is_read_as_it_was_said(direction: Direction[Any], kind: type, data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert direction.read(encode(message).encode(errors="backslashreplace")) == message


@pytest.mark.parametrize(("direction", "kind"), PAIRS, ids=lambda one: getattr(one, "__name__", ""))
def test_every_field_of_every_message_is_checked(direction: Direction[Any], kind: type) -> None:
    said = made(kind)
    direction.decode(said)
    for name, annotation in get_type_hints(kind).items():
        for value in EVERYTHING:
            if fits(annotation, value):
                direction.decode(said | {name: value})
                continue
            with pytest.raises(MessageError, match=f"^a '{said['say']}' whose {name} is "):
                direction.decode(said | {name: value})


@pytest.mark.parametrize(("direction", "kind"), PAIRS, ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_left_out_stands_at_its_default_or_is_missed(direction: Direction[Any], kind: type) -> None:
    said = made(kind)
    for one in fields(kind):
        rest = {key: value for key, value in said.items() if key != one.name}
        if one.default is not MISSING:
            assert getattr(direction.decode(rest), one.name) == one.default
        elif one.default_factory is not MISSING:
            assert getattr(direction.decode(rest), one.name) == one.default_factory()
        else:
            with pytest.raises(MessageError, match=f"^a '{said['say']}' without {one.name}$"):
                direction.decode(rest)


def test_defaults_are_not_sent_and_unknown_keys_are_ignored() -> None:
    assert encode(agents.ProgressReport(generation=3)) == '{"say":"progress_report","generation":3}'
    said = {"say": "ping", "of": "a newer coordinator"}
    assert agents.TO_AGENT.decode(said) == agents.Ping()


def test_a_message_of_another_direction_or_of_none_is_refused() -> None:
    for direction in DIRECTIONS.values():
        for _, kind in PAIRS:
            if kind not in direction.classes:
                with pytest.raises(MessageError, match=f"^'{made(kind)['say']}', which is not allowed here$"):
                    direction.decode(made(kind))
        for said in ({"say": "tick"}, {"say": "no_such"}, {"say": ""}):
            with pytest.raises(MessageError, match="is not allowed"):
                direction.decode(said)
        for nameless in ({}, {"say": None}, {"say": ["ping"]}):
            with pytest.raises(MessageError, match="^no message"):
                direction.decode(nameless)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", [ROW] * (LONGEST_ROWS + 1)),
        ("samples", [ROW[:-1]]),
        ("samples", [[*ROW, 1]]),
        ("samples", [[*ROW[:-1], 1]]),
        ("work", [[1, 2.0]]),
        ("work", [list(range(LONGEST_ROWS + 1))]),
        ("p99", {str(number): 1.0 for number in range(LONGEST_ROWS + 1)}),
        ("p99", {"forward": True}),
        ("step", True),
        ("loss", False),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_rows_that_are_too_many_or_malformed_are_refused(field: str, value: Any) -> None:
    with pytest.raises(MessageError, match=f"^a 'progress_report' whose {field} is .{{1,70}}$"):
        agents.FROM_AGENT.decode({"say": "progress_report", "generation": 1, field: value})


def test_a_command_may_have_more_words_than_a_message_has_rows() -> None:
    words = tuple("x" for _ in range(LONGEST_ROWS + 1))
    order = StartRank(rank=0, generation=1, env={}, command=words)
    assert TO_FORK_SERVER.read(encode(order).encode()) == order


def test_as_many_rows_as_may_be_are_read() -> None:
    said = {"say": "progress_report", "generation": 1, "samples": [ROW] * LONGEST_ROWS, "work": [[1, 2, 3]]}
    report = agents.FROM_AGENT.decode(said)
    assert isinstance(report, agents.ProgressReport)
    assert (report.samples, report.work) == ((tuple(ROW),) * LONGEST_ROWS, ((1, 2, 3),))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"say": "x", "step": NaN}', "no JSON"),
        (b'{"say": "x", "step": -Infinity}', "no JSON"),
        (b'{"say": "x", "step": 1e999}', "no JSON"),
        (b'{"say": "x", "step": -1E+999}', "no JSON"),
        (b'{"say": "x", "step": 9223372036854775808}', "no JSON"),
        (b'{"say": "x", "step": ' + b"9" * 4000 + b"}", "no JSON"),
        (b'{"say": "x", "step": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"say": "x", "step": ' + b"9" * 400 + b".0}", "no JSON"),
        (b'{"say": "x", "rows": ' + b"[" * 50_000, "no JSON"),
        (b'{"say": "x", "rows": ' + b'{"a":' * 20_000, "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"", "no JSON"),
        (b"[]", "no message"),
        (b"{}", "no message"),
        (b'{"say": null}', "no message"),
    ],
)
def test_what_is_no_message_is_refused(line: bytes, why: str) -> None:
    with pytest.raises(MessageError, match=why):
        agents.FROM_AGENT.read(line)


@pytest.mark.parametrize("number", [9223372036854775807, -9223372036854775808, 0.00012345678901234567, 1.5e300, 0.1])
def test_every_number_that_fits_is_read_exactly(number: float) -> None:
    assert parse(json.dumps({"number": number}).encode()) == {"number": number}


def test_digits_in_a_text_are_no_number() -> None:
    text = "9" * 60 + " 1e999 NaN"
    assert parse(json.dumps({"text": text}).encode()) == {"text": text}


def test_a_class_whose_fields_cannot_be_checked_is_found_at_import() -> None:
    with pytest.raises(TypeError, match="cannot have a field of type"):
        Direction(Unchecked)
