"""Points of a sweep: the values of the varied keys in each of its runs."""

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from checkpointing.storage.durable import canonical
from orchestrator.config.compose import flat
from orchestrator.errors import ConfigError

MOST = 1000
"""Maximum number of runs of a sweep."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_AXIS = re.compile(r"(?P<key>\+?[A-Za-z_][\w\-]*(?:\.[\w\-]+)*)=(?P<values>.+)", re.DOTALL)
_INTEGERS = re.compile(r"(-?\d+):(-?\d+)", re.ASCII)
_INTERVAL = re.compile(rf"(?P<log>log:)?(?P<low>{_NUMBER}):(?P<high>{_NUMBER})", re.ASCII)
_PAIRS = {"[": "]", "{": "}", "(": ")"}
_EXAMPLE = "-p optimizer.lr=1e-4,3e-4 -p train.seed=1:5"

Point = dict[str, str]
"""A value as typed for each varied key."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A varied key with its values, or with an interval from which `draw` takes one."""

    key: str
    values: tuple[str, ...] = ()
    draw: Callable[[Random], str] | None = None


def parse_axis(text: str) -> Axis:
    """Parse KEY=VALUES: a list (1e-4,3e-4), whole numbers (1:5), or an interval (1e-5:1e-3, log:1e-5:1e-3).

    Raises ConfigError.
    """
    match = _AXIS.fullmatch(text)
    if match is None:
        raise ConfigError(f"-p {text}: is not KEY=VALUES", where="command line", hint=_EXAMPLE)
    key, values = match["key"], match["values"]
    if key.lstrip("+") == "name":
        raise ConfigError("-p name: a sweep numbers its runs itself", where="command line", hint="-n NAME")
    if (whole := _INTEGERS.fullmatch(values)) is not None:
        low, high = int(whole[1]), int(whole[2])
        if not 0 <= high - low < MOST:
            what = f"-p {text}: must be LOW:HIGH with at most {MOST} whole numbers"
            raise ConfigError(what, where="command line", hint=_EXAMPLE)
        return Axis(key=key, values=tuple(str(number) for number in range(low, high + 1)))
    if (interval := _INTERVAL.fullmatch(values)) is not None:
        return Axis(key=key, draw=_interval(text, float(interval["low"]), float(interval["high"]), interval["log"]))
    found = tuple(dict.fromkeys(_split(values)))
    if not all(found):
        raise ConfigError(f"-p {text}: has an empty value", where="command line", hint=_EXAMPLE)
    return Axis(key=key, values=found)


def _interval(text: str, low: float, high: float, logarithmic: str | None) -> Callable[[Random], str]:
    if not low < high or (logarithmic and low <= 0):
        what = f"-p {text}: must be LOW:HIGH with LOW below HIGH{', both positive' if logarithmic else ''}"
        raise ConfigError(what, where="command line", hint="-p optimizer.lr=log:1e-5:1e-3 --random 10")
    if logarithmic:
        return lambda random: f"{math.exp(random.uniform(math.log(low), math.log(high))):.6g}"
    return lambda random: f"{random.uniform(low, high):.6g}"


def _split(text: str) -> Iterator[str]:
    """Yield the values between the commas that are outside brackets and quotes."""
    closing, quote, start = list[str](), "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _PAIRS:
            closing.append(_PAIRS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char == "," and not closing:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


def points(axes: Sequence[Axis], draws: int | None, seed: int) -> list[Point]:
    """Return all combinations, or `draws` different ones at random. More draws extend the same sequence.

    Raises ConfigError for too many runs, repeated keys, and an interval without random draws.
    """
    keys = [axis.key for axis in axes]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"-p {repeated}: is given twice", where="command line", hint=f"-p {repeated}=VALUE,VALUE")
    intervals = [axis.key for axis in axes if axis.draw is not None]
    grid = math.prod(len(axis.values) for axis in axes if axis.draw is None)
    size = None if intervals else grid
    if draws is None and size is None:
        what = f"-p {intervals[0]}: an interval has no grid"
        raise ConfigError(what, where="command line", hint="--random 10 draws ten points; or list the values")
    wanted = size if draws is None else draws
    assert wanted is not None
    if wanted > MOST or (size is not None and wanted > size):
        most = MOST if size is None else min(MOST, size)
        what = f"{wanted:,} runs are too many: these values allow at most {most:,}"
        raise ConfigError(what, where="command line", hint=f"--random {most} draws {most} of them")
    if draws is None:
        return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]
    found = list(itertools.islice(_draw(axes, seed), wanted))
    if len(found) < wanted:
        what = f"--random {wanted}: the intervals have only {len(found)} different values (six digits are kept)"
        raise ConfigError(what, where="command line", hint=f"--random {len(found)}, or wider intervals")
    return found


_MOST_REPEATS = 100_000
"""Draws in a row without a new point after which there is none: a grid's last of 1000 comes much earlier."""


def _draw(axes: Sequence[Axis], seed: int) -> Iterator[Point]:
    random, drawn, repeats = Random(seed), set[tuple[str, ...]](), 0
    while repeats < _MOST_REPEATS:
        values = tuple(axis.draw(random) if axis.draw else random.choice(axis.values) for axis in axes)
        repeats = repeats + 1 if values in drawn else 0
        if values not in drawn:
            drawn.add(values)
            yield dict(zip((axis.key for axis in axes), values, strict=True))


def overrides(point: Mapping[str, str]) -> tuple[str, ...]:
    """Return a point as a user types it."""
    return tuple(f"{key}={value}" for key, value in point.items())


def base_digest(data: dict[str, Any], varied: Collection[str]) -> str:
    """Return the digest of a resolved configuration without its name and the varied keys."""
    names = {"name", *(key.removeprefix("+") for key in varied)}
    above = tuple(f"{name}." for name in names)
    kept = {key: value for key, value in flat(data).items() if key not in names and not key.startswith(above)}
    return hashlib.sha256(canonical(kept)).hexdigest()
