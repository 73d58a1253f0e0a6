"""Points of a sweep: lists, ranges and intervals, grids and random draws."""

import pytest

from orchestrator.errors import ConfigError
from orchestrator.submission.sweep_points import base_digest, parse_axis, points


def grid(*texts: str, draws: int | None = None, seed: int = 1) -> list[dict[str, str]]:
    return points([parse_axis(text) for text in texts], draws, seed)


def test_a_grid_has_every_combination_in_the_order_typed() -> None:
    found = grid("optimizer.lr=1e-4,3e-4", "train.seed=1:3")
    assert [tuple(point.values()) for point in found] == [
        ("1e-4", "1"), ("1e-4", "2"), ("1e-4", "3"), ("3e-4", "1"), ("3e-4", "2"), ("3e-4", "3"),
    ]  # fmt: skip
    assert list(found[0]) == ["optimizer.lr", "train.seed"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=[1,2],[3]", ("[1,2]", "[3]")), ("a='x,y',z", ("'x,y'", "z")), ("+env.X=1", ("1",)), ("a=5:5", ("5",)),
        ("a=-1:1", ("-1", "0", "1")), ("a=x,x,y", ("x", "y")), ("cluster.time=1:00:00,2:00:00", ("1:00:00", "2:00:00")),
        ("a={b: [1,2], c: 3},{}", ("{b: [1,2], c: 3}", "{}")), ("a=b=c,d", ("b=c", "d")),
    ],
)  # fmt: skip
def test_values(text: str, values: tuple[str, ...]) -> None:
    assert parse_axis(text).values == values


def test_random_points_are_different_and_a_longer_draw_continues_the_shorter_one() -> None:
    texts = ("optimizer.lr=log:1e-5:1e-1", "train.seed=1:3")
    few, many = grid(*texts, draws=5, seed=7), grid(*texts, draws=40, seed=7)
    assert many[:5] == few
    assert len({tuple(point.items()) for point in many}) == 40
    assert few != grid(*texts, draws=5, seed=8)
    rates = sorted(float(point["optimizer.lr"]) for point in many)
    assert 1e-5 <= rates[0] < 1e-3 < rates[-1] <= 1e-1, "spread over the magnitudes"
    assert len(grid("a=1:3", "b=1,2", draws=6)) == 6


@pytest.mark.parametrize(
    ("texts", "draws", "words"),
    [
        (["lr"], None, "is not KEY=VALUES"), (["lr="], None, "is not KEY=VALUES"), (["a=1,,2"], None, "an empty value"),
        (["a=5:1"], None, "LOW:HIGH"), (["a=1:2000"], None, "at most 1000 whole numbers"),
        (["a=0.1:0.2"], None, "an interval has no grid"), (["a=0.2:0.1"], 3, "LOW below HIGH"),
        (["a=log:0:1"], 3, "both positive"), (["a=1,2", "a=3"], None, "given twice"), (["name=a,b"], None, "-p name"),
        (["a=1:3"], 4, "4 runs are too many: these values allow at most 3"),
        (["a=1:100", "b=1:100"], None, "10,000 runs are too many"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(texts: list[str], draws: int | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grid(*texts, draws=draws)
    assert words in caught.value.what
    assert caught.value.hint


def test_the_base_is_what_is_not_varied() -> None:
    data = {"name": "a", "train": {"steps": 5, "seed": 1}, "env": {"X": "1"}}
    other = {"name": "b", "train": {"steps": 5, "seed": 2}, "env": {"X": "2"}}
    varied = ["train.seed", "+env.X"]
    assert base_digest(data, varied) == base_digest(other, varied)
    assert base_digest(data, varied) != base_digest({**other, "train": {"steps": 6, "seed": 1}}, varied)


@pytest.mark.parametrize("interval", ["log:0.1:0.1000001", "1e308:2e308"])
def test_intervals_with_fewer_values_than_draws_are_refused(interval: str) -> None:
    with pytest.raises(ConfigError, match="only 1 different values|only 2 different values"):
        grid(f"a={interval}", draws=5)
