"""Fewer nodes on the real Slurm while one is missing, then all again: every sample is read once, losses are equal."""

from collections.abc import Callable

import pytest

from tests.end_to_end.user import User, assert_no_step_twice_at_once, losses
from tests.fakes.recorded_samples import assert_every_sample_once, assert_nothing_is_drawn_twice, recorded
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.multi, pytest.mark.timeout(500)]
STEPS, BATCH = 60, 24
ELASTIC = [
    "cluster.nodes=4", "cluster.min_nodes=2", "cluster.ranks_per_node=1", "cluster.cpus_per_task=2", "parallel.tp=1",
    "parallel.dp_shard=0", "cluster.partition=low", "cluster.time=10", "recovery.backoff=0.5", "recovery.patience=6",
    f"train.steps={STEPS}", f"train.batch_size={BATCH}", "train.dtype=float32", "train.seq_len=32", "model.layers=1",
    "checkpoint.every=5",
]  # fmt: skip
BOUND = 1e-5
"""Largest relative difference of a step's loss from that of the undisturbed run, in float32."""


def attempts(user: User, run: str) -> list[dict[str, object]]:
    return list(user.show(run)["attempts"])


def trained_in(user: User, run: str, attempt: int) -> list[int]:
    return [line["step"] for line in user.steps(run) if line["attempt"] == attempt]


@pytest.mark.proof
def test_four_nodes_then_three_then_four_again(
    lab: SlurmLab, user: User, record_property: Callable[[str, object], None]
) -> None:
    record = user.folder / "record"
    record.mkdir()
    recording = [*user.slowly(), "workload.target=slow_llama:RecordingLlama", f"+workload.args.record={record}"]
    submitted = user.submit("tiny-gpt", *ELASTIC, *recording)
    run = submitted["run"]
    user.until(lambda: user.step(run) > 12, 120, "training on four nodes")
    gone = lab.nodes_of(submitted["job_id"])[-1]
    lab.kill_node(gone)
    lab.ask("scontrol", "update", f"nodename={gone}", "state=down", "reason=lost")
    try:
        user.until(lambda: len(trained_in(user, run, 3)) > 8, 200, "training on three nodes")
        said = user.run("status", run).stdout
    finally:
        lab.start_node(gone)
    lab.ask("scancel", "--signal=USR2", str(attempts(user, run)[2]["job_id"]))  # as a preemption: it saves and stops
    user.until(lambda: trained_in(user, run, 4), 120, "training on four nodes again")
    user.hurry()
    assert user.wait(run) == 0
    calm = user.submit("tiny-gpt", *ELASTIC, *recording)["run"]
    assert user.wait(calm) == 0

    assert "on 3 of 4 nodes: 1 node was missing for" in " ".join(said.split())
    assert "attempt 3 runs on 3 of 4 nodes: 1 node was missing for" in " ".join(user.run("show", run).stdout.split())
    timeline = user.run("events", run).stdout
    assert "decision: RETRY (continues with fewer nodes: 1 node was missing for" in timeline
    assert "next attempt on all 4 nodes again: Slurm has 4 nodes in service" in timeline
    nodes = [len(attempt["nodes"]) for attempt in attempts(user, run)]
    assert nodes == [4, 0, 3, 4], "the second one waited in the queue"
    waited = attempts(user, run)[1]["failure"]
    assert isinstance(waited, dict)
    assert waited["kind"] == "nodes_missing"
    assert_no_step_twice_at_once(user, run)
    lines = recorded(record, run)
    assert_every_sample_once(lines, recorded(record, calm), STEPS, BATCH)
    assert_nothing_is_drawn_twice(lines)
    record_property("largest difference of a loss, as a share of it", assert_same_curve(user, run, calm))
    rates = {line["step"]: line["lr"] for line in user.steps(calm)}
    assert all(line["lr"] == rates[line["step"]] for line in user.steps(run))


def assert_same_curve(user: User, run: str, calm: str) -> str:
    """Compare the losses of both runs; return the largest relative difference."""
    expected = losses(user, calm)
    found = losses(user, run)
    assert set(found) == set(expected) == set(range(1, STEPS + 1))
    largest = max(abs(found[step] - loss) / loss for step, loss in expected.items())
    assert largest <= BOUND, f"a loss differs by {largest:.2e} of its value"
    return f"{largest:.1e}"
