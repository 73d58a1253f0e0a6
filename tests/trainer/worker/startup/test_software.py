"""Software recorded in a checkpoint, and its differences."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.worker.startup import software as startup
from trainer.worker.startup.software import differences, software


def test_it_is_plain_json_and_the_same_twice() -> None:
    found = software(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found == software(torch.device("cpu"))
    assert found["torch"] == torch.__version__


def test_a_gpu_is_told_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("570.86\n")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(startup, "_DRIVER", tmp_path / "version")
    found = software(torch.device("cuda"))
    assert (found["device"], found["driver"], found["nccl"]) == ("H100", "570.86", "2.27.5")
    assert json.loads(json.dumps(found)) == found
    monkeypatch.setattr(startup, "_DRIVER", tmp_path / "none")
    assert software(torch.device("cuda"))["driver"] is None


CPU = "vendor_id : GenuineIntel\nmodel : 143\nmodel name : Xeon\nflags : {}\n\nvendor_id : not read\n"


def test_cpus_of_one_capability_differ_by_their_model_and_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(startup, "_CPU_INFO", tmp_path / "cpuinfo")

    def model(text: str) -> object:
        (tmp_path / "cpuinfo").write_text(text)
        return software(torch.device("cpu"))["cpu_model"]

    usual = model(CPU.format("fpu avx512f amx_bf16 ibpb"))
    assert str(usual).startswith("Xeon ")
    assert model(CPU.format("amx_bf16 avx512f fpu")) == usual  # a kernel lists other flags, in another order
    assert model(CPU.format("avx512f")) != usual
    assert model(CPU.replace("143", "85").format("avx512f amx_bf16")) != usual
    (tmp_path / "cpuinfo").unlink()
    assert software(torch.device("cpu"))["cpu_model"] is None


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "ATEN_CPU_CAPABILITY"])
def test_a_variable_that_chooses_kernels_is_a_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = software(torch.device("cpu"))
    monkeypatch.setenv(name, "AVX2")
    found = differences(before, software(torch.device("cpu")))
    assert found["kernel_settings"][1].endswith(f"{name}=AVX2")


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"torch": "1"}, {"torch": "1"}, {}),
        ({"torch": "1"}, {"torch": "2"}, {"torch": ["1", "2"]}),
        ({"torch": "1"}, {"torch": "1", "nccl": "2"}, {"nccl": [None, "2"]}),
        ({"torch": "1", "tf32": True}, {"torch": "1"}, {"tf32": [True, None]}),
        ({"cpu_model": "Xeon"}, {"device": "H100"}, {"cpu_model": ["Xeon", None], "device": [None, "H100"]}),
        ({"torch": "1"}, {"torch": "1", "text_hash": "0a"}, {"text_hash": [None, "0a"]}),
    ],
)
def test_differences_are_named_where_something_is_known(before: object, now: dict, found: dict) -> None:
    assert differences(before, now) == found
