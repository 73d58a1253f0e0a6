"""Persistent buffers that differ between ranks are restored on each rank."""

import json
from typing import Any

import pytest

from checkpointing.storage.durable import canonical
from tests.trainer.conftest import hang

WORKLOAD = {"target": "tests.trainer.worker.my_workload:CountsByRank", "args": {"width": 8}}
OVER: dict[str, Any] = {
    "workload": WORKLOAD, "train": {"steps": 2, "dtype": "float32"}, "checkpoint": {"every": 2}
}  # fmt: skip


@pytest.mark.multi
def test_counters_of_each_sharded_rank_survive_a_kill(make_run: Any) -> None:
    hurt = make_run(
        2, workload=WORKLOAD, train={"steps": 8, "dtype": "float32"}, checkpoint={"every": 4},
        parallel={"strategy": "fsdp"}, drill=hang(0, step=8),
    )  # fmt: skip
    assert hurt.train_until_killed(0, committed=4, recorded=6)["codes"][0] == -9, hurt.log()
    assert hurt.train()["codes"] == [0, 0], hurt.log()
    hurt.assert_trained_again(5, 6)


@pytest.mark.multi
def test_more_ranks_begin_with_the_counters_of_the_first(make_run: Any) -> None:
    run = make_run(1, **OVER)
    assert run.train()["codes"] == [0], run.log()
    run.world = 2
    config = json.loads(run.dir.config.read_bytes())
    config["train"]["steps"], config["cluster"]["ranks_per_node"] = 4, 2
    run.dir.config.write_bytes(canonical(config))
    assert run.train()["codes"] == [0, 0], run.log()
    assert sorted(run.losses(generation=2)) == [3, 4]
