"""LoRA that cannot work is refused at submit."""

from typing import Any

import pytest

from trainer.models.hf_workload import HfWorkload
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build
from trainer.worker.workload import WorkloadError


@pytest.mark.parametrize(
    ("settings", "args", "why"),
    [
        ({}, {"lora": {"rank": 4}}, "workload.args.lora.rank: must be one of r, lora_alpha"),
        ({}, {"lora": {"r": 0}}, "workload.args.lora.r=0: must be a whole number above 0"),
        ({}, {"lora": {}, "base": "int4"}, "base=int4: must be one of float32, bfloat16, float16, int8, nf4"),
        ({}, {"base": "int8"}, "workload.args.base: is for a frozen model: type workload.args.lora.r=8"),
        ({}, {"lora": {}, "pretrained": False}, "workload.args.lora: trains beside pretrained weights"),
        ({}, {"task": "masked-lm"}, "workload.args.task=masked-lm: token shards are for causal-lm"),
        ({}, {"pretrained": "no"}, "workload.args.pretrained=no: must be a bool"),
        ({}, {"settings": [1]}, "workload.args.settings=[1]: must be a mapping"),
        ({"parallel": {"tp": 2}}, {"lora": {}}, "adapters are not split by tensor parallelism: type parallel.tp=1"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_submit(settings: dict[str, Any], args: dict[str, Any], why: str) -> None:
    with pytest.raises(WorkloadError) as error:
        HfWorkload(build(JobConfig, settings), name_or_path="/nowhere", **args)
    assert why in str(error.value)
