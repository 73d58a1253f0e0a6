"""What a checkpoint was made with, beside what computes now."""

import json

import pytest
import torch

from trainer.worker.startup.software import differences, software


def test_it_is_plain_json_and_the_same_twice() -> None:
    found = software(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found == software(torch.device("cpu"))
    assert found["torch"] == torch.__version__


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
