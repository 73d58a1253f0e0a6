"""No healthy run is called damaged for its looks, and every kind of damage is found in any run."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.backends import LocalStorage
from checkpointing.verification.verdicts import read_manifest_digest
from tests.trainer.worker.restore_test.conftest import Subject
from tests.trainer.worker.restore_test.damages import IN_ANY_RUN
from tests.trainer.worker.restore_test.unusual_runs import EVERY, KINDS, TESTED, Kind
from trainer.protocol.restore_test import FOUND_BAD, Outcome

pytestmark = pytest.mark.multi

BY_NAME = {kind.name: kind for kind in KINDS}
SEEDS = 3
SAMPLE = ("SkippedUpdates", "TwoUpdatesInAStep", "BeginsAtThousand", "TrainedMask", "from-one-that-skipped")


def check(make_run: Any, place: Path, kind: Kind, seed: int) -> None:
    source = kind.run(make_run, seed)
    place = place / f"seed-{seed}"
    place.mkdir()
    subject = Subject(source.ranks, source, place, itertools.count(1))
    found = kind.verdict(subject, place)
    assert found.outcome not in FOUND_BAD, (kind.name, seed, found)
    assert found.outcome in kind.outcomes, (kind.name, seed, found)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_healthy_run_of_an_unusual_kind_is_not_blamed(make_run: Any, tmp_path: Path, name: str) -> None:
    check(make_run, tmp_path, BY_NAME[name], 0)


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_healthy_runs_of_every_unusual_kind_are_not_blamed(
    make_run: Any, tmp_path: Path, kind: Kind, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(SEEDS):
        check(make_run, tmp_path, kind, seed)
    record_property("healthy runs of unusual kinds that no restore test blames", SEEDS)


def damaged(make_run: Any, place: Path, name: str, seed: int) -> None:
    place = place / f"seed-{seed}"
    place.mkdir()
    source = BY_NAME[name].run(make_run, seed)
    subject = Subject(source.ranks, source, place, itertools.count(1))
    older = subject.folder(EVERY)
    layout = {"world": 1, "parallel": dict(BY_NAME[name].over.get("parallel", {}))}
    healthy = subject.verdict(older, **layout)
    assert (healthy.outcome, healthy.evidence["exact"]) == (Outcome.RESTORED, True), healthy
    for damage in IN_ANY_RUN:
        copy = subject.copy(TESTED)
        damage(copy, older, 2 * seed + 1)  # odd: damages that need one rank
        # The registry knows the manifest that was committed: that of a faulty writer, too.
        manifest = read_manifest_digest(LocalStorage(copy.parent), copy.name)
        found = subject.verdict(copy, **layout, manifest=manifest, agreed=older.name)
        assert found.outcome in FOUND_BAD, (name, seed, damage.__name__, found)


def test_damage_to_an_unusual_run_is_found(make_run: Any, tmp_path: Path) -> None:
    damaged(make_run, tmp_path, "SkippedUpdates", 0)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["Adagrad", "GroupsThatChange", "OddTypes", "SkippedUpdates", "skipped-batches"])
def test_a_hundred_damages_are_found(
    make_run: Any, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(2):
        damaged(make_run, tmp_path, name, seed)
    record_property("damaged checkpoints of unusual runs caught by a restore test", 2 * len(IN_ANY_RUN))
