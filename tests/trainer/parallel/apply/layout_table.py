"""Table of layouts, dense and with experts, and the checks that hold for each.

Each trains as one rank does, goes on after a kill with the same bits, and is restored into others.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import TINY, Ranks, Run, hang, merged
from tests.trainer.worker.restore_test.conftest import Subject
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.plain_data import build
from trainer.protocol.restore_test import Outcome, RestoreVerdict

STEPS, SAVED = 20, 5
BOUND = 2e-5
"""Relative difference of a loss from that of one rank: sums in another order, in float32, over 20 steps. A token whose
two nearest scores differ by less than rounding does could be given to another expert: none is in these runs."""
EXPERTS = {"count": 4, "per_token": 2, "ffn_dim": 48}


@dataclass(frozen=True, kw_only=True)
class Layout:
    world: int
    parallel: Mapping[str, Any]
    experts: bool = False
    layers: int = 2
    steps: int = STEPS
    saved: int = SAVED
    """Steps between saves; validations are half as frequent."""

    @property
    def short(self) -> "Layout":
        """The same ranks in fewer steps, for the fast tests, which compare bits."""
        return replace(self, layers=2 if "pipeline" in self.parallel else 1, steps=7, saved=3)

    @property
    def by_partners_alone(self) -> bool:
        return self.world >= 8 or (self.experts and bool({"pipeline", "tp"} & set(self.parallel)))

    @property
    def settings(self) -> dict[str, Any]:
        model: dict[str, Any] = {"kv_heads": 4, **({"experts": EXPERTS} if self.experts else {})}
        if self.layers != TINY["model"]["layers"]:
            model["layers"] = self.layers
        return {
            "world": self.world, "parallel": dict(self.parallel), "model": model, "optimizer": {"lr": 1e-3},
            "train": {"steps": self.steps, "dtype": "float32"}, "checkpoint": {"every": self.saved, "keep": 100},
            "validation": {"every": 2 * self.saved, "batches": 1},
        }  # fmt: skip

    def config(self, **over: Any) -> JobConfig:
        sections = {"parallel": dict(self.parallel), "model": self.settings["model"]}
        made = build(JobConfig, merged(TINY, {**sections, **over, "cluster": {"ranks_per_node": self.world}}))
        assert isinstance(made, JobConfig)
        return made


def _of(rows: Mapping[str, tuple[int, Mapping[str, Any]]], *, experts: bool) -> dict[str, Layout]:
    found = {name: Layout(world=world, parallel=parallel, experts=experts) for name, (world, parallel) in rows.items()}
    return {**found, **dict(_of_three(experts=experts))}


def _of_three(*, experts: bool) -> Iterator[tuple[str, Layout]]:
    """Yield all layouts of eight ranks in three dimensions of two; with experts, two ranks share them."""
    for chosen in itertools.combinations(("pp", "replicas", "shards", "cp", "tp"), 3):
        parallel: dict[str, Any] = {"ep": 2} if experts else {}
        words = ["pp 2"] if "pp" in chosen else []
        if "pp" in chosen:
            parallel["pipeline"] = {"stages": 2}
        if "replicas" in chosen:
            shards = 1 + ("shards" in chosen)
            parallel |= {"strategy": "hsdp", "dp_replicate": 2, "dp_shard": shards}
            words.append(f"hsdp 2 x {shards}")
        elif "shards" in chosen:
            words.append("fsdp 2")
        if "cp" in chosen:
            method = "ring" if "tp" in chosen else "ulysses"
            parallel |= {"cp": 2, "cp_method": method}
            words.append(f"{method} 2")
        if "tp" in chosen:
            parallel["tp"] = 2
            words.append("tp 2")
        name = " x ".join(words)
        yield f"{name}, ep 2" if experts else name, Layout(world=8, parallel=parallel, experts=experts)


DENSE = _of(
    {
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
        "pp 2 x fsdp 2 x ulysses 2 x tp 2": (16, {"pipeline": {"stages": 2}, "cp": 2, "cp_method": "ulysses", "tp": 2}),
    },
    experts=False,
)
WITH_EXPERTS = _of(
    {
        "one": (1, {}),
        "ep 2": (2, {"ep": 2}),
        "ep 4": (4, {"ep": 4}),
        "fsdp 4": (4, {}),
        "ddp 4": (4, {"strategy": "ddp"}),
        "zero1 4, ep 2": (4, {"strategy": "zero1", "ep": 2}),
        "fsdp 4, ep 2": (4, {"ep": 2}),
        "fsdp 2 x ulysses 2, ep 2": (4, {"ep": 2, "cp": 2, "cp_method": "ulysses"}),
        "fsdp 2 x ring 2, ep 4": (4, {"ep": 4, "cp": 2, "cp_method": "ring"}),
        "hsdp 2 x 2, ep 2": (4, {"ep": 2, "strategy": "hsdp", "dp_replicate": 2}),
        "fsdp 4, ep 2, all on the host": (4, {"ep": 2, "fsdp": {"offload": "all"}}),
        "tp 2, ep 2": (2, {"tp": 2, "ep": 2}),
        "fsdp 2 x tp 2": (4, {"tp": 2}),
        "fsdp 2 x tp 2, ep 4": (4, {"tp": 2, "ep": 4}),
        "ddp 2 x tp 2": (4, {"strategy": "ddp", "tp": 2}),
        "pp 2": (2, {"pipeline": {"stages": 2}}),
        "pp 2 x ep 2": (4, {"pipeline": {"stages": 2}, "ep": 2}),
        "pp 2 x fsdp 2": (4, {"pipeline": {"stages": 2}}),
        "pp 2 x ddp 2": (4, {"pipeline": {"stages": 2, "schedule": "gpipe"}, "strategy": "ddp"}),
        "pp 2 x fsdp 4, ep 2": (8, {"pipeline": {"stages": 2}, "ep": 2}),
        "pp 2 x fsdp 2 x ring 2 x tp 2, ep 2": (
            16,
            {"pipeline": {"stages": 2}, "cp": 2, "cp_method": "ring", "tp": 2, "ep": 2},
        ),
    },
    experts=True,
)
_FOUR_LAYERS = {
    "one": (1, {}),
    "ep 2": (2, {"ep": 2}),
    "interleaved": (2, {"pipeline": {"stages": 4, "schedule": "interleaved_1f1b"}}),
    "interleaved x ep 2": (4, {"pipeline": {"stages": 4, "schedule": "interleaved_1f1b"}, "ep": 2}),
    "zero bubble x fsdp 2": (4, {"pipeline": {"stages": 4, "schedule": "interleaved_zero_bubble"}}),
    "zbv x ep 2": (4, {"pipeline": {"stages": 4, "schedule": "zbv"}, "ep": 2}),
}
WITH_EXPERTS |= {
    f"4 layers, {name}": Layout(world=world, parallel=parallel, experts=True, layers=4)
    for name, (world, parallel) in _FOUR_LAYERS.items()
}


def cases(layouts: Mapping[str, Layout], *sample: str) -> list[Any]:
    names = [name for name, layout in layouts.items() if layout.world > 1]
    return [pytest.param(name, marks=() if name in sample else pytest.mark.proof) for name in names]


def pairs(layouts: Mapping[str, Layout], partners: tuple[str, ...], sample: tuple[str, str] = ("", "")) -> list[Any]:
    """Return pairs of source and target with equally many layers."""
    found = [
        pair
        for pair in itertools.permutations(layouts, 2)
        if all(not layouts[name].by_partners_alone or other in partners for name, other in (pair, pair[::-1]))
        and layouts[pair[0]].layers == layouts[pair[1]].layers
    ]
    return [pytest.param(*pair, marks=() if pair == sample else pytest.mark.proof) for pair in found]


def check_losses(undisturbed: Callable[..., Run], layouts: Mapping[str, Layout], name: str) -> float:
    """Return the largest relative difference of losses and validations from those of one rank."""
    alone = replace(layouts[name], world=1, parallel={})
    one, other = (_every_loss(undisturbed(**each.settings)) for each in (alone, layouts[name]))
    assert sorted(other) == [*range(1, STEPS + 1), STEPS + 10, STEPS + 20]
    largest = max(abs(other[step] - one[step]) / one[step] for step in one)
    assert largest <= BOUND
    return largest


def _every_loss(run: Run) -> dict[int, float]:
    return {**run.losses(), **{STEPS + step: numbers["val_loss"] for step, numbers in run.validations().items()}}


def check_killed(make_run: Callable[..., Run], undisturbed: Callable[..., Run], layout: Layout) -> None:
    """SIGKILL a rank during the run; a later hang keeps the run from ending first."""
    victim = layout.world // 2
    calm = undisturbed(**layout.settings)
    hurt = make_run(**layout.settings, drill=hang(victim, step=3 * layout.saved))
    codes = hurt.train_until_killed(victim, committed=2 * layout.saved)["codes"]
    assert codes[victim] == -9
    assert hurt.train()["codes"] == [ExitCode.FINISHED] * layout.world, hurt.log()
    assert min(step for step in hurt.losses(generation=2) if step <= STEPS) > layout.saved
    assert _every_loss(hurt) == _every_loss(calm)
    assert hurt.final()["weights_digest"] == calm.final()["weights_digest"]


def check_retrained(run: Run, layout: Layout) -> None:
    """SIGKILL a rank after two steps that no checkpoint has; retrained, they have the same bits."""
    victim = layout.world // 2
    before = layout.steps - 2  # the line of a step is written in the next one
    codes = run.train_until_killed(victim, committed=layout.saved, recorded=before)["codes"]
    assert codes[victim] == -9
    assert run.train()["codes"] == [ExitCode.FINISHED] * layout.world, run.log()
    first, again = ({step: _figures(line) for step, line in run.metrics(number).items()} for number in (1, 2))
    assert sorted(again) == [*range(layout.saved + 1, layout.steps + 1)]
    assert {step: first[step] for step in (before - 1, before)} == {step: again[step] for step in (before - 1, before)}
    assert not [event for event in run.events() if event.kind == EventKind.RESTART_DIFFERS]


def _figures(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line.get(name) for name in ("loss", "grad_norm", "lr", "position", "experts")}


def check_restored(ranks: Ranks, source: Run, place: Path, name: str, target: Layout) -> None:
    subject = Subject(ranks, source, place, itertools.count(1))
    test = subject.begin(subject.folder(target.saved), name, target.world, dict(target.parallel), steps=1)
    assert test.train()["codes"] == [ExitCode.FINISHED] * target.world, test.log()
    found = RestoreVerdict.read(test.attempt)
    assert found.outcome is Outcome.RESTORED, found
    assert found.evidence["fingerprints"]
    assert found.evidence["compared"] == 1
    assert found.evidence["ranks"] == target.world
