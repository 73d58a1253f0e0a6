"""The table of strategies: each trains as one rank does, survives a kill bit by bit, and restores into every other."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.worker.conftest import Ranks, Run, hang
from tests.trainer.worker.restore_test.conftest import Subject
from trainer.contract.outcome import ExitCode
from trainer.contract.restore_test import Outcome, RestoreVerdict

pytestmark = [pytest.mark.multi]

STRATEGIES: dict[str, tuple[int, dict]] = {
    "one": (1, {}),
    "ddp 4": (4, {"strategy": "ddp"}),
    "ddp 2 x tp 2": (4, {"strategy": "ddp", "tp": 2}),
    "zero1 4": (4, {"strategy": "zero1"}),
    "zero1 2 x tp 2": (4, {"strategy": "zero1", "tp": 2}),
    "zero2 4": (4, {"strategy": "zero2"}),
    "zero3 4": (4, {"strategy": "zero3"}),
    "fsdp 2 x tp 2": (4, {"strategy": "fsdp", "tp": 2}),
    "hsdp 2 x 2": (4, {"strategy": "hsdp", "dp_replicate": 2}),
    "tp 4": (4, {"tp": 4}),
    "pp 2 x fsdp 2": (4, {"pipeline": {"stages": 2}}),
    "pp 2 x ddp 2": (4, {"pipeline": {"stages": 2, "schedule": "gpipe"}, "strategy": "ddp"}),
    "pp 2 x tp 2": (4, {"pipeline": {"stages": 2}, "tp": 2}),
    "pp 2 x cp 2": (4, {"pipeline": {"stages": 2}, "cp": 2}),
    "ulysses 4": (4, {"cp": 4, "cp_method": "ulysses"}),
    "ring 4": (4, {"cp": 4, "cp_method": "ring"}),
    "fsdp 2 x ulysses 2": (4, {"strategy": "fsdp", "cp": 2, "cp_method": "ulysses"}),
    "ring 2 x tp 2": (4, {"cp": 2, "cp_method": "ring", "tp": 2}),
    "fsdp 4, optimizer on the host": (4, {"fsdp": {"offload": "optimizer"}}),
    "fsdp 4, all on the host": (4, {"fsdp": {"offload": "all"}}),
}
SAME_ARITHMETIC = ("zero3 4", "zero2 4", "fsdp 4, optimizer on the host", "fsdp 4, all on the host")
"""One micro-batch a step: what is gathered when, and where the optimizer runs, changes no sum. Of zero1 neither."""
OTHERS = [name for name in STRATEGIES if name != "one"]
SAMPLE = ("zero1 2 x tp 2",)
STEPS, SAVED = 20, 5
BOUND = 2e-5
"""Relative difference of a loss from that of one rank: sums in another order, in float32, over 20 steps."""


def sampled(names: list[str]) -> list:
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.proof) for name in names]


def settings(name: str) -> dict:
    world, parallel = STRATEGIES[name]
    return {
        "world": world, "parallel": parallel, "model": {"kv_heads": 4}, "optimizer": {"lr": 1e-3},
        "train": {"steps": STEPS, "dtype": "float32"}, "checkpoint": {"every": SAVED, "keep": 100},
    }  # fmt: skip


@pytest.mark.parametrize("name", sampled(OTHERS))
def test_losses_are_those_of_one_rank(
    undisturbed: Callable[..., Run], name: str, record_property: Callable[[str, object], None]
) -> None:
    one, other = (undisturbed(**settings(each)).losses() for each in ("one", name))
    assert sorted(other) == list(range(1, STEPS + 1))
    largest = max(abs(other[step] - one[step]) / one[step] for step in one)
    record_property(f"largest relative difference of 20 losses, {name}", largest)
    assert largest <= BOUND


@pytest.mark.proof
@pytest.mark.parametrize("name", ["zero1 4", *SAME_ARITHMETIC[1:]])
def test_the_same_arithmetic_gives_the_same_bits(undisturbed: Callable[..., Run], name: str) -> None:
    one, other = (undisturbed(**settings(each)) for each in (SAME_ARITHMETIC[0], name))
    assert other.losses() == one.losses()
    assert other.final()["weights_digest"] == one.final()["weights_digest"]


@pytest.mark.parametrize("name", sampled(OTHERS))
def test_a_killed_rank_changes_no_bit(make_run: Callable[..., Run], undisturbed: Callable[..., Run], name: str) -> None:
    calm = undisturbed(**settings(name))
    hurt = make_run(**settings(name), drill=hang(1, step=STEPS - 4))
    codes = hurt.train_until_killed(2, committed=2 * SAVED)["codes"]
    assert codes[2] == -9
    assert hurt.train()["codes"] == [ExitCode.FINISHED] * 4, hurt.log()
    restored = {step for step in hurt.losses(generation=2) if step <= STEPS}
    assert min(restored) > SAVED
    assert hurt.losses() == calm.losses()
    assert hurt.final()["weights_digest"] == calm.final()["weights_digest"]


PAIRS = [(source, target) for source, target in itertools.product(STRATEGIES, STRATEGIES) if source != target]


def restored_into(ranks: Ranks, source: Run, place: Path, target: str) -> RestoreVerdict:
    """The verdict of a restore test: every tensor's fingerprint compared, then a step trained and compared."""
    subject = Subject(ranks, source, place, itertools.count(1))
    world, parallel = STRATEGIES[target]
    test = subject.begin(subject.folder(SAVED), target, world, parallel, steps=1)
    assert test.train()["codes"] == [ExitCode.FINISHED] * world, test.log()
    return RestoreVerdict.read(test.attempt)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(source, target, marks=() if (source, target) == ("zero1 2 x tp 2", "ddp 4") else pytest.mark.proof)
        for source, target in PAIRS
    ],
)
def test_every_strategy_restores_into_every_other(
    ranks: Ranks, undisturbed: Callable[..., Run], tmp_path: Path, source: str, target: str
) -> None:
    found = restored_into(ranks, undisturbed(**settings(source)), tmp_path, target)
    assert found.outcome is Outcome.RESTORED, found
    assert found.evidence["fingerprints"]
    assert found.evidence["compared"] == 1
    assert found.evidence["ranks"] == STRATEGIES[target][0]
