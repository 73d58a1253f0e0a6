"""An agent's look at its ranks: when one stands still, and what excuses it."""

from collections.abc import Iterator

import pytest

from trainer.agent.local_ranks import LocalRanks
from trainer.agent.proc import Signs
from trainer.agent.sampling import Sampler, report_seconds
from trainer.agent.scene import Scene
from trainer.agent.sighting import Sighting
from trainer.contract.progress import Phase


class Host:
    """Two ranks, a clock, and what /proc says of them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu, self.bytes, self.state = 0.0, 0, "S"
        self.looked = 0
        self.ranks = LocalRanks(1, range(2))
        for rank, local in self.ranks.by_rank.items():
            local.pid = 1000 + rank
        self.sampler = Sampler(self.ranks, "n1", clock=lambda: self.now, signs=self.look)

    def look(self, pid: int) -> Signs:
        self.looked += 1
        return Signs(self.state, self.cpu, self.bytes)

    def passes(self, seconds: float, *, cpu: float = 0.0, read: int = 0) -> None:
        for _ in range(int(seconds * 10)):
            self.now += 0.1
            self.cpu += cpu * 0.1
            self.bytes += int(read * 0.1)
            self.sampler.sightings()

    def moves(self, rank: int, monkeypatch: pytest.MonkeyPatch, phase: Phase = Phase.FORWARD) -> None:
        monkeypatch.setattr("time.monotonic_ns", lambda: int(self.now * 1e9))
        self.ranks.by_rank[rank].cell.enter(phase)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    for local in made.ranks.by_rank.values():
        assert local.theirs is not None
        local.theirs.close()
    made.ranks.close()


def of(host: Host, rank: int) -> Sighting:
    return host.sampler.sightings()[rank]


def test_a_rank_that_moves_is_young_and_proc_is_left_alone(host, monkeypatch) -> None:
    for _ in range(20):
        host.now += 0.1
        host.moves(0, monkeypatch)
        host.moves(1, monkeypatch)
        assert of(host, 0).age == pytest.approx(0.0, abs=1e-6)
    assert host.looked == 0


def test_before_its_first_write_a_rank_is_as_old_as_its_generation(host) -> None:
    host.passes(3)
    assert of(host, 0).age == pytest.approx(3.0)
    assert of(host, 0).first


def test_a_still_rank_without_signs_of_life_grows_old_in_both_ways(host, monkeypatch) -> None:
    host.moves(0, monkeypatch)
    host.passes(5)
    seen = of(host, 0)
    assert (seen.age, seen.alive, seen.state) == (pytest.approx(5.0), pytest.approx(5.0), "S")


@pytest.mark.parametrize("life", [{"cpu": 0.5}, {"read": 100_000}])
def test_work_and_bytes_are_signs_of_life(host, monkeypatch, life) -> None:
    host.moves(0, monkeypatch)
    host.passes(5, **life)
    seen = of(host, 0)
    assert seen.age == pytest.approx(5.0)
    assert seen.alive < 1.0


def test_waking_up_now_and_then_is_none(host, monkeypatch) -> None:
    host.moves(0, monkeypatch)
    host.passes(5, cpu=0.01, read=500)
    assert of(host, 0).alive == pytest.approx(5.0)


def test_a_stopped_process_is_seen_within_two_seconds(host, monkeypatch) -> None:
    host.moves(0, monkeypatch)
    host.state = "T"
    host.passes(2)
    assert of(host, 0).state == "T"


def test_only_news_is_reported_and_stillness_is_news(host, monkeypatch) -> None:
    for rank in (0, 1):
        host.moves(rank, monkeypatch)
    assert [row[0] for row in host.sampler.report()["sightings"]] == [0, 1]
    host.now += 0.2
    host.moves(1, monkeypatch)
    assert [row[0] for row in host.sampler.report()["sightings"]] == [1]
    assert "sightings" not in host.sampler.report()
    host.now += 2.0
    assert [row[0] for row in host.sampler.report()["sightings"]] == [0, 1]


def test_an_end_is_reported_once(host, monkeypatch) -> None:
    host.moves(0, monkeypatch)
    host.moves(1, monkeypatch)
    host.sampler.report()
    host.ranks.by_rank[1].ended = True
    (row,) = host.sampler.report()["sightings"]
    assert Sighting.from_row(row, "n1").ended
    host.now += 10
    assert [row[0] for row in host.sampler.report()["sightings"]] == [0]


def test_percentiles_and_work_are_reported_when_they_change(host, monkeypatch) -> None:
    cell = host.ranks.by_rank[0].cell
    cell.warmed()
    host.moves(0, monkeypatch, Phase.FORWARD)
    host.now += 0.5
    host.moves(0, monkeypatch, Phase.BACKWARD)
    cell.worked(10, [1, 2, 3, 4])
    report = host.sampler.report()
    assert 0.5 <= report["p99"]["forward"] < 0.75
    assert report["work"] == [[0, 10, 1, 2, 3, 4]]
    again = host.sampler.report()
    assert "p99" not in again
    assert "work" not in again


def test_large_jobs_report_less_often() -> None:
    assert report_seconds(2) == 0.5
    assert report_seconds(1250) == 1.25


def test_the_coordinator_makes_what_it_heard_as_old_as_it_is() -> None:
    scene = Scene(50.0, 8)
    scene.heard({"sightings": [Sighting(rank=3, node="", age=2.0, alive=1.0, phase="data").to_row()]}, "n2", 60.0)
    assert scene.moved == 58.0
    (seen,) = scene.at(65.0)
    assert (seen.rank, seen.node, seen.age, seen.alive, seen.lock) == (3, "n2", 7.0, 6.0, 0.0)


def test_the_slowest_node_counts_and_may_become_faster() -> None:
    scene = Scene(0.0, 8)
    scene.heard({"p99": {"forward": 2.0}}, "n1", 1.0)
    scene.heard({"p99": {"forward": 1.0}}, "n2", 1.0)
    assert scene.p99() == {"forward": 2.0}
    scene.heard({"p99": {"forward": 0.5}}, "n1", 2.0)
    assert scene.p99() == {"forward": 1.0}


ROW = Sighting(rank=1, node="").to_row()


@pytest.mark.parametrize("row", [[1, 2], {}, None, [*ROW, 1], ["1", *ROW[1:]], [9, *ROW[1:]], [-1, *ROW[1:]],
                                 [*ROW[:2], 3, *ROW[3:]], [*ROW[:5], None, *ROW[6:]], [*ROW[:-1], 1]])  # fmt: skip
def test_what_is_no_sighting_is_refused(row) -> None:
    scene = Scene(0.0, 8)
    with pytest.raises((TypeError, ValueError)):
        scene.heard({"sightings": [row]}, "n1", 1.0)
    assert not len(scene)
