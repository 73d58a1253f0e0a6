"""An exclusion counts from the end of a node's repair."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller.nodes_to_avoid import EVERY, JITTER, RepairedNodes
from orchestrator.registry.records import BY_PERSON, NewRun, Run
from orchestrator.registry.store import Store
from tests.fakes.new_runs import take_lease
from tests.fakes.scheduler import FakeScheduler

DOMAIN, DAY = "lab@login1:6817/0badcafe", 86400.0
NOW = 1_800_000_000.0


class Cluster:
    """A registry with one run, and its Slurm."""

    def __init__(self, store: Store, root: Path) -> None:
        self.store, self.slurm = store, FakeScheduler()
        digest = store.put_config({"name": "big", "recovery": {"exclude_hours": 24.0}})
        lease = take_lease(store, "login1:7:7", time.time(), 3600.0)
        self.epoch = lease.epoch
        new = NewRun(
            slug="big", cluster="slurm", root=root, config_digest=digest, total_steps=9, identity={}, scheduler=DOMAIN
        )
        self.run: Run = store.create_run(new, now=NOW, nonce="0123abcd")[0]
        self.nodes = RepairedNodes(store, {"slurm": self.slurm})

    def exclude(self, name: str, reason: str = "node_lost on it", cluster: str = DOMAIN) -> None:
        self.store.exclude_node(name, cluster, NOW + DAY, reason, epoch=self.epoch, now=NOW)

    def look(self, now: float) -> list[str]:
        return self.nodes.run(lambda: [self.run], self.epoch, now)

    def until(self, name: str) -> float:
        return next(node.excluded_until for node in self.store.nodes() if node.name == name) - NOW


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Store.open(tmp_path / "registry.db") as store:
        yield Cluster(store, tmp_path)


def test_the_day_begins_when_the_node_is_back(cluster: Cluster) -> None:
    cluster.exclude("n1")
    cluster.exclude("n2")
    cluster.slurm.out = frozenset({"n1", "n3"})
    for hour in range(1, 31):  # the repair takes longer than the exclusion
        cluster.look(NOW + hour * 3600)
    assert cluster.until("n1") == 30 * 3600 + DAY
    assert cluster.until("n2") == DAY
    cluster.slurm.out = frozenset()
    cluster.look(NOW + 40 * 3600)
    assert cluster.until("n1") == 30 * 3600 + DAY


def test_what_was_done_is_told_and_slurm_is_asked_rarely(cluster: Cluster) -> None:
    cluster.exclude("n1")
    cluster.slurm.out = frozenset({"n1"})
    told = [cluster.look(NOW + second) for second in range(60, 60 + int(EVERY), 30)]
    assert [len(lines) for lines in told] == [1, *[0] * 19]
    assert len(cluster.look(NOW + 60 + EVERY * (1 + JITTER))) == 1
    assert told[0] == ["n1 is still out of service: its exclusion begins when it is back"]
    assert cluster.slurm.calls == ["out_of_service n1"] * 2


def test_slurm_is_not_asked_while_nothing_is_excluded(cluster: Cluster) -> None:
    cluster.exclude("n1", cluster="another cluster")
    cluster.look(NOW + 60)
    assert cluster.slurm.calls == []


def test_a_persons_exclusion_keeps_its_end(cluster: Cluster) -> None:
    cluster.exclude("n1", reason=f"{BY_PERSON}ada: a fan is loud")
    cluster.slurm.out = frozenset({"n1"})
    assert cluster.look(NOW + 60) == []
    assert cluster.until("n1") == DAY


def test_a_silent_slurm_changes_nothing(cluster: Cluster) -> None:
    cluster.exclude("n1")
    cluster.slurm.silent = True
    assert cluster.look(NOW + 60) == []
    assert cluster.until("n1") == DAY


def test_a_node_that_is_released_meanwhile_stays_released(cluster: Cluster) -> None:
    cluster.exclude("n1")
    before = NOW + DAY
    cluster.store.release_node("n1", DOMAIN, "by hand", epoch=cluster.epoch, now=NOW + 60)
    cluster.store.prolong_exclusion("n1", DOMAIN, before, before + DAY, epoch=cluster.epoch, now=NOW + 61)
    assert cluster.until("n1") == 60


def another_run(cluster: Cluster, exclude_hours: float) -> Run:
    digest = cluster.store.put_config({"name": "other", "recovery": {"exclude_hours": exclude_hours}})
    new = NewRun(
        slug="other", cluster="slurm", root=Path("/"), config_digest=digest, total_steps=9, identity={},
        scheduler=DOMAIN,
    )  # fmt: skip
    return cluster.store.create_run(new, now=NOW, nonce="4567cdef")[0]


@pytest.mark.parametrize("exclude_hours", [12.0, -1.0])
def test_one_run_whose_config_cannot_be_read_does_not_matter(cluster: Cluster, exclude_hours: float) -> None:
    cluster.exclude("n1")
    cluster.slurm.out = frozenset({"n1"})
    other = another_run(cluster, exclude_hours)
    if exclude_hours > 0:
        other = replace(other, config_digest="0" * 64)
    assert cluster.nodes.run(lambda: [cluster.run, other], cluster.epoch, NOW + 60) != []
    assert cluster.until("n1") == 60 + DAY


@pytest.mark.parametrize("first", [True, False])
def test_the_longest_exclusion_of_a_clusters_runs_counts(cluster: Cluster, first: bool) -> None:
    cluster.exclude("n1")
    cluster.slurm.out = frozenset({"n1"})
    both = [another_run(cluster, 1.0), cluster.run]
    cluster.nodes.run(lambda: both if first else both[::-1], cluster.epoch, NOW + 60)
    assert cluster.until("n1") == 60 + DAY
