"""LoRA on two ranks computes what peft computes, saves adapters alone, and refuses what it cannot do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.submitted_run import free_port
from trainer.models.hf_workload import HfWorkload
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build
from trainer.worker.workload import WorkloadError

ROOT, HERE = Path(__file__).resolve().parents[3], Path(__file__).parent
EXACT, ROUNDED = 1e-5, 3e-2
CASES = [
    ("fsdp", "float32", None, EXACT, 0.5), ("ddp", "float32", "int8", EXACT, 0.41),
    ("fsdp", "float32", "nf4", EXACT, 0.16), ("fsdp", "float32", "bfloat16", ROUNDED, 0.26),
    ("fsdp", "bfloat16", "int8", ROUNDED, 0.21),
]  # fmt: skip
"""Strategy, `train.dtype`, `base`, the bound for gradients, and the most of the base's float32 bytes on a rank."""


def run_ranks(program: str, folder: Path, cases: list[Any]) -> dict[str, dict[str, Any]]:
    parts = [ROOT / ".venv" / "interop", ROOT / ".venv" / "finetuning"]
    if not all((part / ".ready").is_file() for part in parts):
        pytest.skip("transformers and peft are not installed apart: `make test` does that")
    environ = {
        **os.environ, "PYTHONPATH": ":".join(map(str, (ROOT, *parts))), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    words = [sys.executable, str(HERE / "make_hf_models.py"), str(folder), "128", "lora"]
    made = subprocess.run(words, env=environ, capture_output=True, check=False)
    assert made.returncode == 0, made.stderr
    words = [sys.executable, str(HERE / program), str(folder / "lora"), json.dumps(cases)]
    ranks = [
        subprocess.Popen(words, env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][1].decode()[-3000:]
    return dict(json.loads(outputs[0][0].splitlines()[-1]))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_ranks("lora_ranks.py", tmp_path_factory.mktemp("models"), [case[:3] for case in CASES])


@pytest.mark.multi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_adapters_train_as_in_peft_and_are_all_that_is_saved(
    found: dict[str, dict[str, Any]], case: tuple[Any, ...]
) -> None:
    *key, bound, share = case
    result = found[json.dumps(key)]
    assert result["begins as base"]
    assert result["gradients"] < bound
    assert result["saved"] == [f"model/{name}" for name in result["adapters"]]
    assert result["share"] <= share
    assert len({one["digest"] for one in found.values()}) == len({key[2] or key[1] for *key, _, _ in CASES})


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
