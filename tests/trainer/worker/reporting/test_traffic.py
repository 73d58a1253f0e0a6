"""Bytes of a step's collectives by mesh dimension."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.trainer.conftest import Run
from trainer.costs.model_flops import parameters
from trainer.protocol.config_sections.recipe_config import ModelConfig
from trainer.worker.reporting.traffic import TrafficMeter


def entry(
    number: int, group: str, sizes: list[int], dtype: str = "Float", out: list[int] | None = None
) -> dict[str, Any]:
    return {
        "record_id": number, "process_group": [group, "its description"],
        "input_sizes": [sizes], "input_dtypes": [dtype],
        "output_sizes": [out or sizes], "output_dtypes": [dtype],
    }  # fmt: skip


def meter(*records: list[dict[str, Any]]) -> TrafficMeter:
    told = iter(records)
    return TrafficMeter({"0": "world", "1": "tp", "2": "dp_shard"}, [lambda: json.dumps({"entries": next(told)})])


def test_the_second_step_is_measured_and_no_other() -> None:
    first = [entry(0, "1", [100])]
    second = [
        *first,
        entry(1, "1", [4, 2], "BFloat16"),
        entry(2, "2", [2], out=[8]),
        entry(3, "0", [3], "Double"),
    ]
    made = meter(first, second)
    assert made.step_ended() is None
    assert made.step_ended() == {"tp": 16, "dp_shard": 32, "world": 24}
    assert made.step_ended() is None


def test_messages_count_once_with_or_without_a_record_of_them() -> None:
    sent = {**entry(0, "2", [10]), "profiling_name": "nccl:send 0->1"}
    received = {**entry(1, "2", [10]), "profiling_name": "nccl:recv 0<-1"}
    made = meter([], [sent, received])
    made.step_ended()
    assert made.step_ended() == {"dp_shard": 40}
    counts = iter([100, 164])
    made = TrafficMeter({}, [lambda: json.dumps({"entries": []})], unrecorded={"cp": lambda: next(counts)})
    made.step_ended()
    assert made.step_ended() == {"cp": 64}


def test_groups_of_others_do_not_count() -> None:
    made = meter([], [entry(0, "7", [100])])
    made.step_ended()
    assert made.step_ended() == {}


def test_a_step_that_the_recorder_has_not_kept_whole_is_not_told() -> None:
    made = meter([entry(0, "1", [1])], [entry(7, "1", [1])])
    made.step_ended()
    assert made.step_ended() == {}


def test_a_record_that_nobody_can_read_is_told_and_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    made = meter([{"no": "record"}], [])
    assert made.step_ended() == {}
    assert "bytes of a step's collectives are unknown: KeyError" in capfd.readouterr().err


@pytest.mark.multi
def test_a_real_step_carries_what_fsdp_sends(undisturbed: Callable[..., Run]) -> None:
    run = undisturbed(
        2,
        parallel={"strategy": "zero3", "fsdp": {"reshard_after_forward": "always"}},
        train={"steps": 3, "dtype": "float32"},
    )
    told = [line["bytes"] for line in run.metrics().values() if "bytes" in line]
    model = ModelConfig(dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=64)
    count = sum(parameter.elements for parameter in parameters(model))
    assert len(told) == 1
    # Gathered for the forward and for the backward pass, then gradients reduced: three times 4 bytes a parameter,
    # and the few numbers on which all ranks agree.
    assert 12 * count < told[0]["dp_shard"] < 12 * count + 1000


@pytest.mark.multi
def test_a_stage_sends_its_activations_and_says_what_it_waits_for(undisturbed: Callable[..., Run]) -> None:
    train = {"steps": 3, "dtype": "float32", "batch_size": 8, "seq_len": 32}
    run = undisturbed(2, parallel={"pipeline": {"stages": 2}}, model={"layers": 2}, train=train)
    lines = list(run.metrics().values())
    (told,) = [line["bytes"] for line in lines if "bytes" in line]
    sent = 8 * 32 * 32 * 4  # float32 of dim 32 for every token, from rank 0 to rank 1
    assert sent <= told["pp"] < sent + 1000  # plus the row of the step's sums
    for before, line in pairwise(lines):
        assert set(line["exposed"]) == {"receives", "sends", "reductions"}
        # Both are of the step before.
        assert line["bubble"] == pytest.approx(line["exposed"]["receives"] / before["seconds"], abs=1e-4)
        assert line["bubble"] < 1
    assert all(lines[-1]["exposed"][kind] > 0 for kind in ("receives", "sends", "reductions"))
