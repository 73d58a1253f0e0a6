"""Names that an attempt is to inherit: another node has seen them, so they are waited for and missed."""

import pytest

from checkpointing.engine import restoring
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.errors import NothingVerifies
from tests.checkpointing.engine.conftest import Bench, blank


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "LATE_S", 0.3)
    monkeypatch.setattr(restoring, "_PATIENCE_S", 0.01)


def heir(bench: Bench, *steps: int) -> Checkpointer:
    return bench.checkpointer(attempt=2, nonce="22222222", inherit=tuple(bench.folder(step).name for step in steps))


@pytest.mark.usefixtures("impatient")
def test_an_inheritance_that_is_gone_is_not_a_fresh_start(bench: Bench) -> None:
    with pytest.raises(NothingVerifies, match="step-00000005.*not there"):
        heir(bench, 5).restore(blank())


@pytest.mark.usefixtures("impatient")
def test_a_newer_one_that_is_gone_is_told_and_the_older_one_taken(bench: Bench) -> None:
    bench.saved(5)
    restored = heir(bench, 10, 5).restore(blank())
    assert restored is not None
    assert restored.step == 5
    (refusal,) = bench.told("checkpoint.refused")
    assert (refusal["step"], refusal["name"]) == (10, bench.folder(10).name)
    assert "not there" in refusal["reason"]


def test_a_name_that_comes_late_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.saved(5, 10)
    away = bench.folder(10).rename(bench.root.parent / "away")
    monkeypatch.setattr(restoring.time, "sleep", lambda _: away.exists() and away.rename(bench.folder(10)))
    restored = heir(bench, 10, 5).restore(blank())
    assert restored is not None
    assert restored.step == 10
    assert bench.told("checkpoint.refused") == []


def test_an_older_one_that_is_gone_is_nobodys_business(bench: Bench) -> None:
    bench.saved(10)
    restored = heir(bench, 10, 5).restore(blank())
    assert restored is not None
    assert restored.step == 10
