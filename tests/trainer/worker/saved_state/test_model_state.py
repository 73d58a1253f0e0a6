"""Model state beyond the weights: restored, or refused by name."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from trainer.worker.saved_state.checkpoint_contents import tensor_metadata
from trainer.worker.saved_state.model_state import BufferState, ModelEntries, ParameterForms, cannot_be_filled
from trainer.worker.workload import WorkloadError

CPU = torch.device("cpu")


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))


def test_what_has_no_memory_of_its_own_cannot_be_filled() -> None:
    two = torch.ones(2, 1)
    numbers = torch.ones(2, dtype=torch.complex64).conj()
    for odd in (two.expand(2, 3), numbers, numbers.imag):
        assert cannot_be_filled(odd)
    for usual in (
        two,
        two.expand(2, 1),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([two], layout=torch.jagged),
    ):
        assert not cannot_be_filled(usual)


def test_a_parameter_that_is_gone_is_named() -> None:
    model = Counts()
    forms = ParameterForms(model)
    forms.refuse_changed()
    del model.weight
    with pytest.raises(WorkloadError, match=r"^parameter weight from build_model\(\) is gone, so a restart"):
        forms.refuse_changed()


class WithObject(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.own = object()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}own"] = self.own


def test_an_object_in_the_state_of_a_module_must_stay_the_same_one() -> None:
    model = WithObject()
    entries = ModelEntries(model)
    entries.refuse_changed()
    model.own = object()
    with pytest.raises(WorkloadError, match=r"^own in the model's state_dict\(\) has changed"):
        entries.refuse_changed()


@pytest.mark.usefixtures("world")
def test_a_buffer_that_becomes_sharded_is_refused_and_one_that_was_cannot_be_made_of_nothing() -> None:
    model = Counts()
    state = BufferState(model, 0, CPU)
    assert state.facts() == {}
    sharded = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Replicate()], run_check=False)
    model.register_buffer("seen", sharded)
    with pytest.raises(WorkloadError, match=r"^buffer seen became a sharded tensor of shape \[3\] after build_model"):
        state.facts()
    saved = {"buffers": {"changed": {"seen": tensor_metadata(sharded)}}}
    with pytest.raises(
        WorkloadError, match=r"has buffer seen \['float32', \[3\], 'cpu', True\], which the model does not"
    ):
        BufferState(Counts(), 0, CPU).targets([saved], {})


def test_a_buffer_of_a_module_that_is_not_there_is_refused() -> None:
    saved = {"buffers": {"changed": {"gone.seen": tensor_metadata(torch.ones(2))}}}
    with pytest.raises(
        WorkloadError, match=r"^the checkpoint has buffer gone.seen in a module that the model does not"
    ):
        BufferState(Counts(), 0, CPU).targets([saved], {})


def test_ranks_beyond_the_saving_world_read_the_buffers_of_the_first() -> None:
    for ranks, source in ((1, 0), (2, 1)):
        targets = BufferState(Counts(), 1, CPU).targets([{}], {"ranks": ranks})
        assert targets.keys() == {f"buffers/rank-{source:05d}/seen"}
