"""Runs that train on fewer ranks for a while use every sample once and reach the same losses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import canonical
from orchestrator.config.run_config import RunConfig
from orchestrator.recovery.elastic_policy import resize_config, world_sizes
from tests.fakes import slow_llama
from tests.fakes.recorded_samples import assert_every_sample_once, assert_nothing_is_drawn_twice, recorded
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.plain_data import build

pytestmark = pytest.mark.multi

BATCH = 24
BOUND = 1e-5
"""Largest relative difference of a step's loss from that of an undisturbed run, in float32 (docs/failures.md)."""


def elastic(tmp_path: Path, nodes: int, steps: int, parallel: dict[str, Any], **train: Any) -> dict[str, Any]:
    code, record = tmp_path / "code", tmp_path / "record"
    code.mkdir(exist_ok=True)
    record.mkdir(exist_ok=True)
    shutil.copy(Path(slow_llama.__file__), code / "recording.py")
    return {
        "cluster": {"nodes": nodes, "min_nodes": 1},
        "parallel": parallel,
        "train": {"dtype": "float32", "batch_size": BATCH, "steps": steps, "seq_len": 8, **train},
        "optimizer": {"lr": 1e-3, "warmup_steps": 4},
        "workload": {"target": "recording:RecordingLlama", "path": [str(code)], "args": {"record": str(record)}},
    }


def begin(run: Any, number: int, nodes: int) -> None:
    base = {**json.loads(run.dir.config.read_text())}
    base["cluster"] |= {"ranks_per_node": 1}
    config = build(RunConfig, base)
    (size,) = [one for one in world_sizes(config) if one.nodes == nodes]
    run.attempt_number, run.generations, run.world = number, 0, nodes
    place = run.dir.attempt(number)
    place.make()
    place.config.write_bytes(canonical(resize_config(base, size)))
    saved = tuple(path.name for path in run.dir.checkpoints.iterdir() if (path / "COMMIT").exists())
    LaunchToken(
        attempt=number, epoch=1, job_id=str(number), nonce=f"0123abc{number}", checkpoints=saved
    ).write(place.go)  # fmt: skip


def train(run: Any, number: int, nodes: int, until: int | None = None) -> None:
    begin(run, number, nodes)
    stop = {"do": "ask", "rank": 0, "of_rank": 0, "at_step": until, "reason": "PREEMPTION"}
    answer = run.train(actions=[stop] if until is not None else [])
    expected = ExitCode.FINISHED if until is None else ExitCode.STOPPED_AFTER_SAVE
    assert answer["codes"] == [expected] * nodes, run.log()


def lines_of(run: Any) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for attempt in run.dir.all_attempts():
        if attempt.metrics.exists():
            found |= {line["step"]: line for line in map(json.loads, attempt.metrics.read_text().splitlines())}
    return found


def compare(
    tmp_path: Path, make_run: Any, sizes: tuple[int, int, int], steps: int, over: dict[str, Any], *, beside: int = 0
) -> float:
    """Return the largest difference of a loss between a run of these sizes and an undisturbed one."""
    calm, hurt = make_run(sizes[0], name="calm", **over), make_run(sizes[0], name="hurt", **over)
    train(calm, 1, beside or sizes[0])
    third = steps // 3
    for number, (nodes, until) in enumerate(zip(sizes, (third, 2 * third, None), strict=True), 1):
        train(hurt, number, nodes, until)
    expected, found = lines_of(calm), lines_of(hurt)
    assert list(found) == list(expected) == list(range(1, steps + 1))
    assert [line["lr"] for line in found.values()] == [line["lr"] for line in expected.values()]
    assert [line["position"] for line in found.values()] == [BATCH * step for step in range(steps)]
    assert {line["attempt"] for line in found.values()} == {1, 2, 3}
    record = tmp_path / "record"
    assert_every_sample_once(recorded(record, "hurt"), recorded(record, "calm"), steps, BATCH)
    assert_nothing_is_drawn_twice(recorded(record, "hurt"))
    return max(abs(found[step]["loss"] - line["loss"]) / line["loss"] for step, line in expected.items())


def test_three_nodes_then_two_then_three(tmp_path: Path, make_run: Any) -> None:
    assert compare(tmp_path, make_run, (3, 2, 3), 9, elastic(tmp_path, 3, 9, {}), beside=1) <= BOUND


LAYOUTS = [
    pytest.param((4, 3, 4), {}, id="fsdp 4-3-4"),
    pytest.param((4, 2, 4), {}, id="fsdp 4-2-4"),
    pytest.param((4, 3, 4), {"strategy": "ddp"}, id="ddp 4-3-4"),
    pytest.param((4, 2, 4), {"dp_replicate": 2, "dp_shard": 2}, id="hsdp 4-2-4"),
    pytest.param((4, 2, 4), {"tp": 2, "tp_across_nodes": True}, id="tp 4-2-4"),
    pytest.param((4, 2, 4), {"cp": 2}, id="ulysses 4-2-4"),
    pytest.param((4, 2, 4), {"cp": 2, "cp_method": "ring"}, id="ring 4-2-4"),
]


@pytest.mark.proof
@pytest.mark.parametrize(("sizes", "parallel"), LAYOUTS)
def test_every_layout(
    sizes: tuple[int, int, int], parallel: dict[str, Any], tmp_path: Path, make_run: Any,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    largest = compare(tmp_path, make_run, sizes, 60, elastic(tmp_path, 4, 60, parallel))
    record_property("largest difference of a loss, as a share of it", f"{largest:.1e}")
    assert largest <= BOUND, f"a loss differs by {largest:.2e} of its value"


@pytest.mark.proof
def test_ranks_that_share_experts(
    tmp_path: Path, make_run: Any, record_property: Callable[[str, object], None]
) -> None:
    over = {**elastic(tmp_path, 4, 60, {"ep": 2}), "model": {"experts": {"count": 4, "ffn_dim": 48}}}
    largest = compare(tmp_path, make_run, (4, 2, 4), 60, over)
    record_property("largest difference of a loss, as a share of it, experts", f"{largest:.1e}")
    assert largest <= BOUND, f"a loss differs by {largest:.2e} of its value"
