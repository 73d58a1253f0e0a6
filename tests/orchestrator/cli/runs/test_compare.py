"""`orch compare`: what differs between runs, and their losses beside each other."""

import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli.runs.compare import LossCurve, Scale, common_steps, read_curve, sparkline
from orchestrator.states import AttemptState
from tests.orchestrator.cli.conftest import Seeds, Type


def trained(
    seeds: Seeds, slug: str, losses: dict[int, float], identity: dict[str, Any] | None = None, **optimizer: Any
) -> str:
    digest = seeds.store.put_config({"name": slug, "train": {"steps": 200}, "optimizer": optimizer, "env": {}})
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


def test_compare_two_runs_as_json(orch: Type, seeds: Seeds) -> None:
    first = trained(seeds, "a", {1: 5.0, 2: 4.0, 3: 3.0}, lr=0.1)
    software = {"code": {"orch": {"version": "0.2", "sha256": "f" * 64}}, "env": {"python": "3.12.1"}}
    second = trained(seeds, "b", {2: 4.5, 3: math.nan, 4: 2.0}, software, lr=0.2, warmup_steps=7)
    data = orch("compare", first, second, "--json").data
    assert data["config"] == [
        {"key": "name", "values": {first: "a", second: "b"}},
        {"key": "optimizer.lr", "values": {first: 0.1, second: 0.2}},
        {"key": "optimizer.warmup_steps", "values": {first: None, second: 7}},
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


def test_compare_two_runs_as_text(orch: Type, seeds: Seeds) -> None:
    first, second = trained(seeds, "a", {1: 5.0, 2: 4.0}, lr=0.1), trained(seeds, "a", {1: 5.0, 2: 4.5}, lr=0.2)
    shown = orch("compare", first, second).out
    assert "KEY           a-1  a-2\noptimizer.lr  0.1  0.2\n" in shown
    assert "   1  5.0000  5.0000           0\n   2  4.0000  4.5000        +0.5\n" in shown
    assert "software" not in shown


def test_runs_without_a_shared_step(orch: Type, seeds: Seeds) -> None:
    first, second = trained(seeds, "a", {1: 5.0}), trained(seeds, "a", {2: 4.0})
    shown = orch("compare", first, second).out
    assert "configuration: the same" in shown
    assert "the runs share no trained step" in shown


def test_runs_are_chosen_by_tags_too_and_two_are_needed(orch: Type, seeds: Seeds) -> None:
    first, second, third = (trained(seeds, "a", {1: 5.0}) for _ in range(3))
    for run in (first, second):
        orch("tag", run, "sweep")
    assert [row["run"] for row in orch("compare", "-t", "sweep", "--json").data["runs"]] == [first, second]
    assert [row["run"] for row in orch("compare", third, first, third, "-t", "sweep", "--json").data["runs"]] == [
        third, first, second,
    ]  # fmt: skip


def test_too_few_runs_are_refused_with_what_was_looked_for(orch: Type, seeds: Seeds) -> None:
    first, second = (trained(seeds, "a", {1: 5.0}) for _ in range(2))
    orch("tag", first, "killed")
    orch("tag", second, "control")
    refused = {
        (): "none was found",
        (first, first): f"only {first} was found",
        ("-t", "killed"): f"only {first} was found",
        (second, "-t", "x"): f"only {second} was found",
        ("-t", "killed", "-t", "control"): "none was found",
    }
    said = {words: orch("compare", *words) for words in refused}
    for words, found in refused.items():
        assert (said[words].code, f"two or more runs, {found}\n" in said[words].err) == (2, True), said[words].err


# -- equal bit for bit?


def computing(
    seeds: Seeds, steps: dict[int, tuple[float, float, dict[str, float]]], validated: dict[int, dict[str, float]]
) -> str:
    run = trained(seeds, "a", {})
    place = seeds.root / run / "attempts" / "001" / "metrics"
    lines = [
        dump_line({
            "time": time.time(), "generation": 1, "step": step, "loss": loss, "grad_norm": norm, "lr": 0.1,
            "seconds": random.random(), "tokens_per_s": random.random(), "stall": random.random(), "metrics": own,
        })
        for step, (loss, norm, own) in steps.items()
    ]  # fmt: skip
    (place / "steps.jsonl").write_text("\n".join(lines) + '\n{"step": 1, "lo')
    if validated:
        lines = [
            dump_line({"time": time.time(), "step": step, "seconds": random.random(), "metrics": own})
            for step, own in validated.items()
        ]
        (place / "validation.jsonl").write_text("\n".join(lines) + '\n{"step": 2, "se')
    return run


STEPS = {step: (5.0 / step, math.nan if step == 2 else 0.3, {"accuracy": 0.1 * step % 0.4}) for step in range(1, 5)}
VALIDATED = {2: {"val_loss": 2.5}, 4: {"val_loss": math.nan}}


def test_equal_runs(orch: Type, seeds: Seeds) -> None:
    first, second = computing(seeds, STEPS, VALIDATED), computing(seeds, {**STEPS, 5: (1.0, 1.0, {})}, VALIDATED)
    said = "\nequal bit for bit: 4 of 4 shared steps (loss, gradient norm, metrics), 2 of 2 validations\n"
    assert said in orch("compare", first, second).out
    data = orch("compare", first, second, "--json").data
    assert list(data)[-1] == "equality"
    assert data["equality"] == {"equal": True, "steps": 4, "validations": 2, "first_difference": None}


def in_the_last_bit(step: int) -> dict[int, tuple[float, float, dict[str, float]]]:
    loss, norm, own = STEPS[step]
    return {**STEPS, step: (math.nextafter(loss, 9.0), norm, own)}


@pytest.mark.parametrize(
    ("steps", "validated", "said", "what"),
    [
        (in_the_last_bit(3), VALIDATED, "3: loss 1.6666666666666667 and 1.666666666666667", "loss"),
        ({**STEPS, 2: (2.5, 0.3, {"accuracy": 0.2})}, {}, "2: gradient norm nan and 0.3", "gradient norm"),
        ({**STEPS, 1: (5.0, 0.3, {"accuracy": 0.0})}, VALIDATED, "1: metric accuracy 0.1 and 0.0", "metric accuracy"),
        ({**STEPS, 1: (5.0, 0.3, {})}, VALIDATED, "1: metric accuracy 0.1 and none", "metric accuracy"),
        (
            in_the_last_bit(3), {2: {"val_loss": 2.25}, 4: {"val_loss": 1.0}},
            "2: validation val_loss 2.5 and 2.25", "validation val_loss",
        ),
        # NaN on both sides is equal, and so are other spellings of a number; 0.0 and -0.0 are not.
        (
            {**STEPS, 2: (2.5, math.nan, {"accuracy": 0.25})}, VALIDATED,
            "2: metric accuracy 0.2 and 0.25", "metric accuracy",
        ),
        (
            {**STEPS, 4: (1.25, 0.3, {"accuracy": -0.0})}, VALIDATED,
            "4: metric accuracy 0.0 and -0.0", "metric accuracy",
        ),
        (STEPS, {4: {"val_loss": -0.0}}, "4: validation val_loss nan and -0.0", "validation val_loss"),
    ],
)  # fmt: skip
def test_first_difference(orch: Type, seeds: Seeds, steps: Any, validated: Any, said: str, what: str) -> None:
    first, second = computing(seeds, STEPS, VALIDATED), computing(seeds, steps, validated)
    shown = orch("compare", first, second).out
    assert f"\nfirst difference at step {said}\n" in shown
    assert "equal bit for bit" not in shown
    told = orch("compare", first, second, "--json").data["equality"]
    assert (told["equal"], told["first_difference"]["what"]) == (False, what)
    assert list(told["first_difference"]["values"]) == [first, second]


def test_compare_three_runs(orch: Type, seeds: Seeds) -> None:
    first, second, third = computing(seeds, STEPS, {}), computing(seeds, STEPS, {}), computing(seeds, STEPS, {})
    wrote(seeds.root / third, 2, {4: 1.5})
    assert "first difference at step 4: loss 1.25, 1.25 and 1.5\n" in orch("compare", first, second, third).out
    assert "equal bit for bit: 4 of 4 shared steps" in orch("compare", first, second).out


def test_equality_needs_a_shared_step(orch: Type, seeds: Seeds) -> None:
    first, second = trained(seeds, "a", {1: 5.0}), trained(seeds, "a", {2: 4.0})
    assert "equal" not in orch("compare", first, second).out
    told = orch("compare", first, second, "--json").data["equality"]
    assert told == {"equal": None, "steps": 0, "validations": 0, "first_difference": None}


def test_long_names_are_numbered_where_there_is_no_room(orch: Type, seeds: Seeds) -> None:
    long = [trained(seeds, f"a-very-long-name-of-a-run-{lr}", {1: 5.0}, lr=lr) for lr in (1, 2, 3, 4, 5, 6)]
    shown = orch("compare", *long).out
    assert f"#6  {long[5]}\n" in shown
    assert "KEY           #1 " in shown


# -- curves


def test_newest_loss_of_a_step_counts(tmp_path: Path) -> None:
    wrote(tmp_path, 1, {1: 5.0, 2: 4.0, 3: 3.0})
    wrote(tmp_path, 2, {2: 4.1, 3: 3.1, 4: math.inf})
    assert read_curve(tmp_path).losses == {1: 5.0, 2: 4.1, 3: 3.1, 4: math.inf}
    assert read_curve(tmp_path / "nowhere") == LossCurve()


@pytest.mark.parametrize(
    ("most", "steps"), [(1, [100]), (2, [50, 100]), (10, [*range(10, 101, 10)]), (200, [*range(1, 101)])]
)
def test_common_steps_are_spread_evenly_and_end_with_the_last(most: int, steps: list[int]) -> None:
    long = LossCurve(dict.fromkeys(range(101), 1.0))
    assert common_steps([long, LossCurve(dict.fromkeys(range(1, 120), 1.0))], most) == steps


def test_curves_share_one_scale_and_one_axis() -> None:
    falling = LossCurve({step: float(80 - step) for step in range(80)})
    later = LossCurve({step: 1.0 for step in range(40, 60)} | {step: math.nan for step in range(60, 80)})
    scale = Scale.from_curves([falling, later])
    assert sparkline(falling, scale, 8) == "█▇▆▅▄▃▂▁"
    assert sparkline(later, scale, 8) == "    ▁▁xx"
    assert sparkline(LossCurve(), scale, 8) == ""


def test_one_outlier_does_not_flatten_the_curve() -> None:
    spiky = LossCurve({step: float(100 - step) for step in range(100)} | {50: 1e9})
    curve = sparkline(spiky, Scale.from_curves([spiky]), 10)
    assert len(set(curve)) > 5


def test_a_flat_curve_is_a_line() -> None:
    flat = LossCurve({1: 2.0, 2: 2.0})
    assert sparkline(flat, Scale.from_curves([flat]), 10) == "▁▁"


def test_compare_commands(orch: Type, seeds: Seeds) -> None:
    names = []
    for slug, step, loss in (("a", 300, 1.25), ("b", 120, 2.5), ("c", 0, None)):
        digest = seeds.store.put_config({"name": slug, "command": ["python", "train.py"]})
        new = replace(seeds.new(slug), config_digest=digest, total_steps=300)
        run, _ = seeds.store.create_run(new, now=100.0, nonce="0123abcd")
        if step:
            seeds.store.note_run(run.name, epoch=seeds.epoch, now=150.0, step=step, loss=loss)
        names.append(run.name)
    said = orch("compare", *names).out
    assert "orch records no losses by step for a `command`\n" in said
    assert "no step was trained" not in said
