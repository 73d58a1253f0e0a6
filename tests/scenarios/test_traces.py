"""Seeded traces through every kind of bad day: safety after each turn, and an end without a person."""

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from orchestrator.states import RunState
from tests.scenarios.trace import MOMENTS, OUTAGES, Trace
from tests.scenarios.world import checked_store

MEMORY = Path("/dev/shm")
"""Traces write many small files: in memory where there is such a place."""


def live(seed: int, monkeypatch: pytest.MonkeyPatch, store: Any = None, kind: type[Trace] = Trace) -> Trace:
    """One seed's life, from a submission to an end that is allowed; returns what is left of it in memory."""
    root = Path(mkdtemp(prefix="orch-trace-", dir=MEMORY if MEMORY.is_dir() else None))
    trace = kind(root, seed, monkeypatch, store)
    try:
        try:
            run = trace.run()
        except BaseException as error:
            raise AssertionError(f"seed {seed} after {trace.told}: {error}") from error
        allowed = {RunState.SUCCEEDED} if trace.cancel_at is None else {RunState.SUCCEEDED, RunState.CANCELLED}
        assert run.state in allowed, f"seed {seed} after {trace.told}: {run.state}, {run.reason}"
        assert not trace.world.store.user_requests(), f"seed {seed} after {trace.told}: an ask was never answered"
        return trace
    finally:
        trace.close()
        shutil.rmtree(root)


MANY = ((0, 2, 4, 8, 12, 13, 19, 33, 42), (19, 20, 22, 24, 30, 31, 32, 37, 38, 40, 41, 44, 46))
"""Every fault strikes in these, and they go through each line and branch that the first fifty seeds reach, but for a
few that other scenarios are about; the others are more of the same."""


@pytest.mark.parametrize("seeds", MANY, ids=("first", "second"))
def test_seeds_with_every_fault(seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    told = {fault for seed in seeds for fault in live(seed, monkeypatch).told}
    assert told >= {*MOMENTS, *OUTAGES}, {*MOMENTS, *OUTAGES} - told


@pytest.mark.proof
@pytest.mark.parametrize("block", range(40))
def test_a_thousand_seeds(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(block * 25, block * 25 + 25):
        live(seed, monkeypatch)


@pytest.mark.parametrize("seed", [19, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (1, 3, 17, 42))])
def test_the_same_on_the_real_registry(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with checked_store(tmp_path / "registry.db") as store:
        live(seed, monkeypatch, store)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(100))
def test_twenty_thousand_seeds(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000 + block * 200, 1000 + block * 200 + 200):
        live(seed, monkeypatch)
