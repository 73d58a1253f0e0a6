"""Which checkpoints retention deletes."""

import errno
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.config import BestConfig, CheckpointConfig
from checkpointing.format.commit import DELETED
from checkpointing.format.manifest import parse
from checkpointing.retention.garbage import pin
from checkpointing.retention.policy import (
    FLOOR,
    Policy,
    TierRetention,
    decide_retention,
    read_metric,
    select_expired,
)
from checkpointing.storage.backends import LocalStorage, Storage
from checkpointing.tiers.catalog import Entry, Owner
from checkpointing.verification.verdicts import RESTORE_TESTED, CopyVerdict, read_manifest_digest, record
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.made_checkpoint import OWNER, make, tier_at


def entry(step: int) -> Entry:
    name = f"step-{step:08d}.001-ab12cd34"
    return Entry(name=name, path=Path(name), step=step, attempt=1, nonce="ab12cd34", bytes=1, committed_at=0.0)


newest_first = st.lists(st.integers(0, 1000), unique=True, max_size=20).map(
    lambda steps: [entry(step) for step in sorted(steps, reverse=True)]
)
policies = st.builds(
    Policy,
    keep=st.integers(-1, 8),
    every=st.sampled_from([0, 1, 7, 100]),
    best=st.integers(0, 4),
    mode=st.sampled_from(["min", "max"]),
)
ratings = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@dataclass(frozen=True)
class Case:
    """Random checkpoints and the facts that retention considers."""

    entries: list[Entry]
    policy: Policy
    facts: dict[str, Any]

    def judged(self) -> dict[str, bool]:
        return {judged.entry.name: judged.stays for judged in decide_retention(self.entries, self.policy, **self.facts)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    entries = draw(newest_first)
    names = [entry.name for entry in entries]
    some = st.sets(st.sampled_from(names)) if names else st.just(set())
    facts = {
        "restore_tested": draw(st.sampled_from(names)) if names and draw(st.booleans()) else None,
        "metrics": {name: draw(ratings) for name in names},
        "pinned": draw(some),
        "refused": draw(some),
        "held": draw(some),
        "newest": draw(st.sampled_from(names)) if names else None,
    }
    return Case(entries, draw(policies), facts)


def what_goes_is_trusted_and_nobodys(case: Case) -> None:
    gone = {entry.name for entry, _ in select_expired(case.entries, case.policy, **case.facts)}
    single = {case.facts["newest"], case.facts["restore_tested"]}
    assert not gone & (case.facts["pinned"] | case.facts["refused"] | case.facts["held"] | single)


def never_fewer_than_two_trusted_ones_stay_and_they_are_the_newest(case: Case) -> None:
    trusted = [entry.name for entry in case.entries if entry.name not in case.facts["refused"]]
    stays = case.judged()
    assert all(stays[name] for name in trusted[: max(case.policy.keep, FLOOR)])


def multiples_and_the_best_stay(case: Case) -> None:
    trusted = [entry for entry in case.entries if entry.name not in case.facts["refused"]]
    stays, policy = case.judged(), case.policy
    if policy.every:
        assert all(stays[entry.name] for entry in trusted if entry.step % policy.every == 0)
    rated = [case.facts["metrics"][entry.name] for entry in trusted]
    finite = sorted(value for value in rated if value is not None and abs(value) < float("inf"))
    best = finite[: policy.best] if policy.mode == "min" else finite[::-1][: policy.best]
    kept = [case.facts["metrics"][entry.name] for entry in trusted if stays[entry.name]]
    assert all(value in kept for value in best)


def a_second_pass_finds_nothing_more(case: Case) -> None:
    gone = {entry.name for entry, _ in select_expired(case.entries, case.policy, **case.facts)}
    left = [entry for entry in case.entries if entry.name not in gone]
    assert select_expired(left, case.policy, **case.facts) == []


def the_oldest_goes_first_and_everything_has_a_reason(case: Case) -> None:
    gone = select_expired(case.entries, case.policy, **case.facts)
    assert [entry.step for entry, _ in gone] == sorted(entry.step for entry, _ in gone)
    assert all(judged.reason for judged in decide_retention(case.entries, case.policy, **case.facts))


def an_untrusted_checkpoint_is_no_substitute(case: Case) -> None:
    """Refused checkpoints change nothing for the others."""
    refused = case.facts["refused"]
    without = Case([entry for entry in case.entries if entry.name not in refused], case.policy, case.facts)
    others = {name: stays for name, stays in case.judged().items() if name not in refused}
    assert others == without.judged()


@given(cases())
def test_which_checkpoints_are_kept_and_deleted(case: Case) -> None:
    for rule in (
        what_goes_is_trusted_and_nobodys,
        never_fewer_than_two_trusted_ones_stay_and_they_are_the_newest,
        multiples_and_the_best_stay,
        a_second_pass_finds_nothing_more,
        the_oldest_goes_first_and_everything_has_a_reason,
        an_untrusted_checkpoint_is_no_substitute,
    ):
        rule(case)


def reasons(policy: Policy, *steps: int, **facts: Any) -> dict[int, str]:
    return {
        judged.entry.step: judged.reason
        for judged in decide_retention([entry(step) for step in steps], policy, **facts)
    }


def test_every_decision_says_why() -> None:
    reported = reasons(
        Policy(keep=2, every=100, best=1),
        800, 700, 650, 600, 550, 520, 510, 507, 505,
        metrics={entry(520).name: 0.5, entry(650).name: 0.7, entry(510).name: float("nan")},
        pinned=[entry(650).name], refused=[entry(800).name], held=[entry(510).name], newest=entry(550).name,
        restore_tested=entry(507).name,
    )  # fmt: skip
    assert reported == {
        800: "it is not trusted and is kept as evidence",
        700: "it is one of the newest 2",
        650: "it is pinned",
        600: "its step is a multiple of 100",
        550: "it was just committed",
        520: "it is one of the best 1 by loss",
        510: "it is being copied",
        507: "it is the newest one that passed a restore test",
        505: "not one of the newest 2, not a multiple of 100 steps, not one of the best 1 by loss",
    }


def test_the_newer_of_two_equally_good_checkpoints_stays() -> None:
    metrics = {entry(step).name: 1.0 for step in (1, 2, 3, 4)}
    policy = Policy(keep=2, best=1)
    gone = select_expired([entry(step) for step in (4, 3, 2, 1)], policy, metrics=metrics)
    assert [entry.step for entry, _ in gone] == [1, 2], "4 is the best one, and one of the newest"


# ---- a pass over a real folder


class Tier:
    """One folder with checkpoints, and the events that retention reports."""

    def __init__(self, root: Path, storage: Storage | None = None) -> None:
        self.root, self.storage = root, storage or LocalStorage(root)
        self.place = tier_at(root, self.storage)
        self.reported: list[tuple[str, dict[str, Any]]] = []

    def make(self, *steps: int, losses: dict[int, Any] | None = None, **options: Any) -> list[str]:
        extra = {step: {"loss": loss} for step, loss in (losses or {}).items()}
        return [make(self.storage, step, extra=extra.get(step), **options) for step in steps]

    def steps(self) -> list[int]:
        return [entry.step for entry in self.place.catalog.committed_entries()]

    def apply_retention(
        self,
        newest: str,
        policy: Policy | None = None,
        owner: Owner = OWNER,
        pins: Storage | None = None,
        **options: Any,
    ) -> TierRetention:
        emit = lambda kind, data: self.reported.append((kind, data))  # noqa: E731
        retention = TierRetention(self.place, policy or Policy(keep=2), owner, emit, pins)
        retention.apply(newest, **options)
        return retention


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path / "tier")


def test_a_pass_deletes_the_oldest_and_reports_it(tier: Tier) -> None:
    names = tier.make(1, 2, 3, 4)
    tier.apply_retention(names[-1])
    assert tier.steps() == [4, 3]
    assert tier.reported == [
        ("checkpoint.deleted", {"step": step, "name": names[step - 1], "tier": str(tier.root)}) for step in (1, 2)
    ]


def test_pins_are_read_in_the_runs_own_folder(tier: Tier, tmp_path: Path) -> None:
    names = tier.make(1, 2, 3, 4, 5)
    run = LocalStorage(tmp_path / "run")
    pin(tier.storage, names[0], "", 0.0)
    pin(run, names[1], "for the paper", 0.0)
    tier.apply_retention(names[-1], pins=run)
    assert tier.steps() == [5, 4, 2]


def test_pins_that_cannot_be_read_stop_all_deletion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = Tier(tmp_path, storage := Faulty(tmp_path))
    names = tier.make(1, 2, 3, 4)
    storage.broken = lambda delete_debris, _: errno.EIO if delete_debris == "list pins" else 0
    with caplog.at_level(logging.WARNING):
        tier.apply_retention(names[-1])
    assert tier.steps() == [4, 3, 2, 1]
    assert "could not be deleted yet" in caplog.text


def test_a_checkpoint_that_is_pinned_during_the_pass_stays(tier: Tier) -> None:
    names = tier.make(1, 2, 3, 4)
    fence = lambda: pin(tier.storage, names[1], "quick", 0.0) is None  # noqa: E731
    tier.apply_retention(names[-1], owner=replace(OWNER, fence=fence))
    assert tier.steps() == [4, 3, 2]


def test_the_best_are_found_by_the_metrics_in_their_manifests(tier: Tier) -> None:
    names = tier.make(1, 2, 3, 4, 5, losses={1: 0.5, 2: 0.1, 3: "nan", 4: 0.9, 5: 0.9})
    retention = tier.apply_retention(names[-1], Policy.from_config(2, CheckpointConfig(best=BestConfig(metric="loss"))))
    assert tier.steps() == [5, 4, 2]
    assert retention.metrics[names[1]] == 0.1


def test_a_checkpoint_with_a_missing_file_does_not_count_and_stays(tier: Tier) -> None:
    names = tier.make(1, 2, 3, 4)
    (tier.root / names[2] / "__0_0.distcp").unlink()
    tier.apply_retention(names[-1])
    assert tier.steps() == [4, 3, 2], "2 is the substitute that 3 cannot be"


def restore_tested(tier: Tier, name: str, run: Storage | None = None) -> None:
    found = read_manifest_digest(tier.storage, name)
    record(
        run or tier.storage,
        CopyVerdict(name=name, place=tier.place.path, manifest=found, ok=True, level=RESTORE_TESTED, at=1.0),
    )


def test_the_newest_checkpoint_that_passed_a_restore_test_stays(tier: Tier, tmp_path: Path) -> None:
    """Of two only the newer one stays, until a still newer one has passed too."""
    names, run = tier.make(1, 2, 3, 4, 5, 6), LocalStorage(tmp_path / "run")
    restore_tested(tier, names[0], run)
    restore_tested(tier, names[2], run)
    restore_tested(Tier(tmp_path / "other", tier.storage), names[1], run)
    tier.apply_retention(names[-1], pins=run)
    assert tier.steps() == [6, 5, 3]
    restore_tested(tier, names[4], run)
    tier.apply_retention(*tier.make(7), pins=run)
    assert tier.steps() == [7, 6, 5]


def test_a_restore_test_counts_for_the_copy_that_it_was_about(tier: Tier) -> None:
    names = tier.make(1, 2, 3, 4, 5)
    for name in names[:3]:
        restore_tested(tier, name)
    for file in (tier.root / names[2]).iterdir():
        file.unlink()
    tier.make(3, losses={3: 0.5})
    tier.apply_retention(names[-1], refused=[names[1]])
    assert tier.steps() == [5, 4, 2, 1], "3 is another one now, and 2 is only evidence"


def test_refused_and_foreign_checkpoints_are_not_deleted(tier: Tier) -> None:
    (foreign,) = tier.make(1, attempt=7, nonce="77777777")
    names = tier.make(2, 3, 4, 5)
    tier.apply_retention(names[-1], refused=[names[2]])
    assert tier.steps() == [5, 4, 3, 1]
    assert (tier.root / foreign / "COMMIT").exists()


def test_the_latest_commit_stays_although_older_work_has_higher_steps(tier: Tier) -> None:
    names = tier.make(8, 9, 10, 3)
    tier.apply_retention(names[-1])
    assert tier.steps() == [10, 9, 3]


def test_a_lost_fence_stops_the_pass(tier: Tier) -> None:
    names = tier.make(1, 2, 3, 4)
    tier.apply_retention(names[-1], owner=replace(OWNER, fence=lambda: False))
    assert tier.steps() == [4, 3, 2, 1]
    assert tier.reported == []


def test_debris_of_this_and_of_ended_attempts_is_deleted(tier: Tier) -> None:
    names = tier.make(1, 2)
    half_own, half_held = tier.make(3, 4)
    (handed,) = tier.make(5, attempt=1, nonce="00000001")
    (half_ended,) = tier.make(6, attempt=1, nonce="00000001")
    (half_foreign,) = tier.make(7, attempt=2, nonce="22222222")
    (buried,) = tier.make(8, attempt=2, nonce="22222222")
    for name in (half_own, half_held, half_ended, half_foreign):
        (tier.root / name / "COMMIT").unlink()
    (tier.root / buried / DELETED).write_text("")
    tier.apply_retention(names[-1], Policy(keep=3), replace(OWNER, inherit=(handed,)), held=[half_held])
    assert {path.name for path in tier.root.iterdir()} == {*names, half_held, handed, half_foreign}


def test_debris_of_attempts_without_checkpoints_is_deleted_by_name_and_nonce(tier: Tier) -> None:
    names = tier.make(1, 2)
    (half,) = tier.make(3, attempt=1, nonce="00000001")
    (half_foreign,) = tier.make(4, attempt=1, nonce="99999999")
    for name in (half, half_foreign):
        (tier.root / name / "COMMIT").unlink()
    tier.apply_retention(names[-1], owner=replace(OWNER, ended_attempts=("1-00000001", "2", "x-99999999", "")))
    assert {path.name for path in tier.root.iterdir()} == {*names, half_foreign}


def test_finishing_the_deletion_of_another_attempt_is_reported(tier: Tier) -> None:
    names = tier.make(1, 2)
    own, handed, foreign = *tier.make(3), *tier.make(4, nonce="00000001"), *tier.make(5, nonce="99999999")
    for name in (own, handed, foreign):
        (tier.root / name / DELETED).write_text("")
    tier.apply_retention(names[-1], owner=replace(OWNER, ended_attempts=("1-00000001",)))
    assert {path.name for path in tier.root.iterdir()} == set(names)
    assert [data["name"] for kind, data in tier.reported if kind == "checkpoint.deleted"] == [handed, own]


def test_a_folder_that_cannot_be_deleted_does_not_stop_the_pass(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    names = tier.make(1, 2, 3, 4)
    half, other = tier.make(6, 5)
    for name in (half, other):
        (tier.root / name / "COMMIT").unlink()
    for name in (half, names[0]):
        (tier.root / name / "mine").mkdir()
        (tier.root / name / "mine" / "notes").write_text("keep me")
    with caplog.at_level(logging.WARNING):
        tier.apply_retention(names[-1])
    assert {path.name for path in tier.root.iterdir()} == {*names[2:], names[0], half}
    assert [data["name"] for _, data in tier.reported] == [names[1]]
    assert caplog.text.count("not empty") == 2


def test_a_node_local_disk_is_freed_of_what_no_attempt_inherits(tier: Tier) -> None:
    gone, handed, pinned = tier.make(1, 2, 3, nonce="00000001")
    (tested,) = tier.make(0, nonce="00000001")
    restore_tested(tier, tested)
    tier.make(4, nonce="99999999")
    owner = replace(OWNER, inherit=(handed,), ended_attempts=("1-00000001",))
    pin(tier.storage, pinned, "", 0.0)
    tier.apply_retention(*tier.make(10), Policy(keep=9), owner)
    assert tier.steps() == [10, 4, 3, 2, 1, 0], "a shared tier is the next attempt's business"
    tier.place = replace(tier.place, shared=False)
    tier.apply_retention(tier.place.catalog.names()[0], Policy(keep=9), owner)
    assert tier.steps() == [10, 4, 3, 2, 1, 0], "one of its own is not enough"
    tier.apply_retention(*tier.make(11), Policy(keep=9), owner)
    assert tier.steps() == [11, 10, 4, 3, 2, 0]
    assert [data["name"] for _, data in tier.reported] == [gone]


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("loss", 0.25),
        ("val_loss", 0.5),
        ("step", 7.0),
        ("word", None),
        ("none", None),
        ("flag", None),
        ("metrics", None),
    ],
)
def test_a_metric_is_a_number_in_the_facts(tier: Tier, metric: str, value: float | None) -> None:
    facts = {"loss": 0.25, "metrics": {"val_loss": 0.5, "step": 7}, "step": 1, "word": "yes", "flag": True}
    name = make(tier.storage, 1, extra=facts)
    manifest = parse((tier.root / name / "manifest.json").read_bytes())
    assert read_metric(manifest, metric) == value
