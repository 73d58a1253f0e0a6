"""What a checkpoint was made with, beside what computes now."""

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


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"torch": "1"}, {"torch": "1"}, {}),
        ({"torch": "1"}, {"torch": "2"}, {"torch": ["1", "2"]}),
        ({"torch": "1"}, {"torch": "1", "nccl": "2"}, {"nccl": [None, "2"]}),
        ({"torch": "1", "tf32": True}, {"torch": "1"}, {"tf32": [True, None]}),
        (None, {"torch": "1"}, {}),
        ("torn", {"torch": "1"}, {}),
    ],
)
def test_differences_are_named_where_something_is_known(before: object, now: dict, found: dict) -> None:
    assert differences(before, now) == found
