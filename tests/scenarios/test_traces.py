"""Seeded traces through every kind of bad day: safety after each turn, and an end without a person."""

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from orchestrator.states import RunState
from tests.scenarios.trace import Trace
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


# Every fault strikes in the fifty seeds of the first two blocks; the others are more of the same.
@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=() if block < 2 else pytest.mark.proof) for block in range(40)]
)
def test_a_thousand_seeds(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(block * 25, block * 25 + 25):
        live(seed, monkeypatch)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (3, 17, 42))])
def test_the_same_on_the_real_registry(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with checked_store(tmp_path / "registry.db") as store:
        live(seed, monkeypatch, store)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(100))
def test_twenty_thousand_seeds(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000 + block * 200, 1000 + block * 200 + 200):
        live(seed, monkeypatch)
