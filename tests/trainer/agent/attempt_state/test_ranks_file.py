"""What people on a login node see of every rank."""

import json

from trainer.agent.attempt_state.published_files import MOST, rank_readings
from trainer.agent.watch.hang_limits import RankSample
from trainer.agent.watch.sampling import JobSnapshot
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.rank_readings import RankReadings


def reading(seen: list[RankSample], **ratios: float) -> RankReadings:
    """Of ranks that were heard of just now."""
    snapshot, slow = JobSnapshot(0.0, len(seen)), {int(key[1:]): ratio for key, ratio in ratios.items()}
    for sample in seen:
        snapshot.add_report(ProgressReport(generation=1, samples=(sample.to_row(),)), sample.node, 100.0)
    shown = snapshot.worst(100.0, MOST, slow)
    return rank_readings(shown, world=len(snapshot), time=5.0, generation=2, p99={"data": 0.1}, ratios=slow)


def test_every_rank_of_a_small_job_stands_there(tmp_path) -> None:
    seen = [RankSample(rank=rank, node="n1", step=7, phase="forward", age=0.04) for rank in range(3)]
    reading(seen, r1=1.3).write(tmp_path / "ranks.json")
    told = json.loads((tmp_path / "ranks.json").read_text())
    assert (told["world"], told["generation"], told["p99"]) == (3, 2, {"data": 0.1})
    assert [(row["rank"], row["ratio"]) for row in told["ranks"]] == [(0, None), (1, 1.3), (2, None)]


def test_of_a_large_job_the_slow_and_the_still_ones() -> None:
    seen = [RankSample(rank=rank, node="n1", age=0.1) for rank in range(1000)]
    seen[500] = RankSample(rank=500, node="n1", age=9.0)
    told = reading(seen, r900=1.2)
    ranks = [one.rank for one in told.ranks]
    assert told.world == 1000
    assert len(ranks) == MOST
    assert {500, 900} <= set(ranks)
    assert ranks == sorted(ranks)


def test_a_rank_that_was_not_heard_of_for_long_is_as_still_as_one_that_says_so() -> None:
    snapshot = JobSnapshot(0.0, 1000)
    for rank in range(1000):
        row = RankSample(rank=rank, node="n1", age=0.5 if rank == 7 else 0.1).to_row()
        snapshot.add_report(ProgressReport(generation=1, samples=(row,)), "n1", 90.0 if rank == 3 else 100.0)
    assert [one.rank for one in snapshot.worst(100.0, 2, {})] == [3, 7]
    assert snapshot.worst(100.0, 1, {})[0].age == 10.1


def test_of_a_users_own_program_nothing_is_made_up() -> None:
    seen = [RankSample(rank=0, node="n1", age=24.8)]
    (one,) = rank_readings(seen, world=1, time=5.0, generation=1, p99={}, ratios={}, command=True).ranks
    assert (one.step, one.phase, one.age, one.node) == (None, "command", None, "n1")
