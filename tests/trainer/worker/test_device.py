"""How strict a workload is with operations that have no deterministic kernel."""

from collections.abc import Iterator

import pytest
import torch

from trainer.contract.config import JobConfig
from trainer.worker import device as devices
from trainer.worker import workload
from trainer.worker.workload import BaseWorkload


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    on, warn, fill = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    yield
    torch.use_deterministic_algorithms(on, warn_only=warn)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def test_the_built_in_workload_is_strict_and_another_one_may_choose():
    assert workload.build(JobConfig()).strictly_deterministic
    assert not BaseWorkload(JobConfig()).strictly_deterministic


def test_strict_is_more_than_a_warning(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    devices.be_deterministic(torch.get_num_threads())
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    devices.be_strict()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
