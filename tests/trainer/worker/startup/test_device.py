"""Device of a rank, classification of device faults, and strictness about nondeterministic operations."""

from collections.abc import Iterator

import pytest
import torch

from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.worker import workload
from trainer.worker.startup import rendezvous as devices
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


def chosen(monkeypatch, visible: int, local_rank: int) -> torch.device:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return devices.choose(ClusterShape(ranks_per_node=4, gpus_per_node=4), local_rank)


def test_a_rank_takes_its_own_device(monkeypatch):
    assert chosen(monkeypatch, 4, 2) == torch.device("cuda", 2)


# One visible GPU, or one less than was asked for, would be shared by several ranks.
@pytest.mark.parametrize(("visible", "local_rank"), [(0, 0), (3, 3), (2, 3), (1, 0), (1, 2), (3, 0)])
def test_a_node_with_too_few_devices_is_suspect(monkeypatch, visible, local_rank):
    with pytest.raises(devices.NodeFault, match=f"sees {visible} GPU") as raised:
        chosen(monkeypatch, visible, local_rank)
    assert devices.is_node_fault(raised.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("Unable to determine the device handle: GPU has fallen off the bus", True),
        ("CUDA error: out of memory", False),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_broken_hardware_is_told_from_broken_code(text, fault):
    assert devices.is_node_fault(RuntimeError(text)) is fault
    assert not devices.is_node_fault(ValueError(text))
