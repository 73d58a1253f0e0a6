"""`orch compare`: what differs between runs, and their losses beside each other."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli.runs.loss_curve import LossCurve, Scale, common_steps, sparkline
from orchestrator.states import AttemptState
from tests.orchestrator.cli.conftest import Seeds, Type


def trained(
    seeds: Seeds, slug: str, losses: dict[int, float], identity: dict[str, Any] | None = None, **train: Any
) -> str:
    """A run with this recipe whose first attempt took 60 s and wrote these losses."""
    digest = seeds.store.put_config({"name": slug, "train": {"steps": 200, **train}, "env": {}})
    new = replace(seeds.new(slug), config_digest=digest, identity=identity or seeds.new(slug).identity)
    run, _ = seeds.store.create_run(new, now=100.0, nonce="0123abcd")
    stamp = {"epoch": seeds.epoch, "now": 170.0}
    seeds.store.move_attempt(run.name, 1, AttemptState.ENDED, "", **stamp, started_at=110.0, ended_at=170.0)
    wrote(seeds.root / run.name, 1, losses)
    return run.name


def wrote(folder: Path, attempt: int, losses: dict[int, float]) -> None:
    place = folder / "attempts" / f"{attempt:03d}" / "metrics"
    place.mkdir(parents=True)
    lines = [dump_line({"step": step, "loss": loss, "tokens_per_s": 100.0 + step}) for step, loss in losses.items()]
    (place / "steps.jsonl").write_text("\n".join(lines) + '\n{"step": 99, "lo')  # the last one is torn by a kill


def test_what_differs_and_what_both_have_trained(orch: Type, seeds: Seeds) -> None:
    first = trained(seeds, "a", {1: 5.0, 2: 4.0, 3: 3.0}, lr=0.1)
    software = {"code": {"orch": {"version": "0.2", "sha256": "f" * 64}}, "env": {"python": "3.12.1"}}
    second = trained(seeds, "b", {2: 4.5, 3: math.nan, 4: 2.0}, software, lr=0.2, warmup_steps=7)
    data = orch("compare", first, second, "--json").data
    assert data["config"] == [
        {"key": "name", "values": {first: "a", second: "b"}},
        {"key": "train.lr", "values": {first: 0.1, second: 0.2}},
        {"key": "train.warmup_steps", "values": {first: None, second: 7}},
    ]
    assert data["losses"] == [
        {"step": 2, "values": {first: 4.0, second: 4.5}}, {"step": 3, "values": {first: 3.0, second: "nan"}},
    ]  # fmt: skip
    assert {row["key"]: row["values"][second] for row in data["software"]} == {
        "code.orch": "0.2 ffffffffffff", "env.python": "3.12.1", "data.fingerprint": None,
    }  # fmt: skip
    told = data["runs"][0]
    keys = ("run", "state", "tokens_per_s", "running_s", "attempts", "steps")
    assert {key: told[key] for key in keys} == {
        "run": first, "state": "CREATED", "tokens_per_s": 102.0, "running_s": 60.0, "attempts": 1, "steps": 3,
    }  # fmt: skip


def test_people_get_tables_with_the_difference_of_two(orch: Type, seeds: Seeds) -> None:
    first, second = trained(seeds, "a", {1: 5.0, 2: 4.0}, lr=0.1), trained(seeds, "a", {1: 5.0, 2: 4.5}, lr=0.2)
    shown = orch("compare", first, second).out
    assert "KEY       a-1  a-2\ntrain.lr  0.1  0.2\n" in shown
    assert "   1  5.0000  5.0000           0\n   2  4.0000  4.5000        +0.5\n" in shown
    assert "software" not in shown


def test_equal_runs_and_runs_without_a_common_step_say_so(orch: Type, seeds: Seeds) -> None:
    first, second = trained(seeds, "a", {1: 5.0}), trained(seeds, "a", {2: 4.0})
    shown = orch("compare", first, second).out
    assert "configuration: the same" in shown
    assert "no step was trained by all of them" in shown


def test_runs_are_chosen_by_tags_too_and_two_are_needed(orch: Type, seeds: Seeds) -> None:
    first, second, third = (trained(seeds, "a", {1: 5.0}) for _ in range(3))
    for run in (first, second):
        orch("tag", run, "sweep")
    assert [row["run"] for row in orch("compare", "-t", "sweep", "--json").data["runs"]] == [first, second]
    assert [row["run"] for row in orch("compare", third, first, third, "-t", "sweep", "--json").data["runs"]] == [
        third, first, second,
    ]  # fmt: skip
    for words, why in (((), "no run is named"), ((first, first), f"only {first} is named"), (("-t", "x"), "no run")):
        refused = orch("compare", *words)
        assert (refused.code, why in refused.err) == (2, True)


def test_long_names_are_numbered_where_there_is_no_room(orch: Type, seeds: Seeds) -> None:
    long = [trained(seeds, f"a-very-long-name-of-a-run-{lr}", {1: 5.0}, lr=lr) for lr in (1, 2, 3, 4, 5, 6)]
    shown = orch("compare", *long).out
    assert f"#6  {long[5]}\n" in shown
    assert "KEY       #1 " in shown


# -- curves


def test_of_a_step_that_was_trained_again_the_newest_loss_counts(tmp_path: Path) -> None:
    wrote(tmp_path, 1, {1: 5.0, 2: 4.0, 3: 3.0})
    wrote(tmp_path, 2, {2: 4.1, 3: 3.1, 4: math.inf})
    assert LossCurve.read(tmp_path).losses == {1: 5.0, 2: 4.1, 3: 3.1, 4: math.inf}
    assert LossCurve.read(tmp_path / "nowhere") == LossCurve()


@pytest.mark.parametrize(
    ("most", "steps"), [(1, [100]), (2, [50, 100]), (10, [*range(10, 101, 10)]), (200, [*range(1, 101)])]
)
def test_common_steps_are_spread_evenly_and_end_with_the_last(most: int, steps: list[int]) -> None:
    long = LossCurve(dict.fromkeys(range(101), 1.0))
    assert common_steps([long, LossCurve(dict.fromkeys(range(1, 120), 1.0))], most) == steps


def test_curves_share_one_scale_and_one_axis() -> None:
    falling = LossCurve({step: float(80 - step) for step in range(80)})
    later = LossCurve({step: 1.0 for step in range(40, 60)} | {step: math.nan for step in range(60, 80)})
    scale = Scale.of([falling, later])
    assert sparkline(falling, scale, 8) == "█▇▆▅▄▃▂▁"
    assert sparkline(later, scale, 8) == "    ▁▁xx"
    assert sparkline(LossCurve(), scale, 8) == ""
    assert sparkline(falling, scale, 8, "_.-=*#%@") == "@%#*=-._"


def test_one_outlier_does_not_flatten_the_curve() -> None:
    spiky = LossCurve({step: float(100 - step) for step in range(100)} | {50: 1e9})
    curve = sparkline(spiky, Scale.of([spiky]), 10)
    assert len(set(curve)) > 5


def test_a_flat_curve_is_a_line() -> None:
    flat = LossCurve({1: 2.0, 2: 2.0})
    assert sparkline(flat, Scale.of([flat]), 10) == "▁▁"
