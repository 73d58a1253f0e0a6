"""Exports with optimizer state can be imported again without loss."""

from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch

from checkpointing.engine.interchange.importer import ImportedTensor, TorchTensors, tensor_info, write_checkpoint
from checkpointing.format.commit import Name
from checkpointing.storage.backends import LocalStorage
from tests.trainer.models.test_hugging_face import SMALL, brought_in, job, model_of, whole
from trainer.models.checkpoint_export import ExportRequest, export
from trainer.worker.saved_state.checkpoint_contents import model_tensors
from trainer.worker.saved_state.optimizer_state import OptimizerState


def stepped(seed: int) -> tuple[torch.nn.Module, Any, OptimizerState]:
    model = model_of(SMALL, seed=seed)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
    held = OptimizerState(model, optimizer)
    held.prime()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 * seed)
    optimizer.step()
    optimizer.param_groups[0]["estimate"] = torch.tensor([seed, 0.5])
    return model, optimizer, held


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_what_an_optimizer_counts_goes_through_an_export(tmp_path: Path, with_optimizer: bool) -> None:
    model, optimizer, held = stepped(1)
    of_optimizer = held.tensors()
    tensors = {key: tensor.detach() for key, tensor in {**model_tensors(model), **of_optimizer}.items()}
    extra = {
        "step": 2, "consumed": 40, "loss": 1.5, "seed": None, "fingerprint": None,
        "rank_state": [{"optimizer": held.facts(of_optimizer), "attributes": {"data.consumed": "40"}}],
    }  # fmt: skip
    source = {
        key: ImportedTensor(external=TorchTensors(tensors), name=key, info=tensor_info(tensors[key])) for key in tensors
    }
    made, storage = Name(step=2, attempt=1, nonce="ab"), LocalStorage(tmp_path / "run")
    write_checkpoint(storage, made, source, extra=extra, world={"ranks": 1})
    export(
        storage,
        str(made),
        ExportRequest(to="torch", folder=tmp_path / "pt", config=job(SMALL), with_optimizer=with_optimizer),
    )
    with brought_in(tmp_path / "pt", SMALL, tmp_path / "in") as after:
        if not with_optimizer:
            assert "rank_state" not in after.manifest.extra
            assert after.manifest.step == 0
            return
        (facts,) = after.manifest.extra["rank_state"]
        assert facts.keys() == {"optimizer"}
        _, other, again = stepped(2)
        targets = again.targets(facts["optimizer"])
        assert targets.keys() == of_optimizer.keys()
        with torch.no_grad():
            for key, tensor in targets.items():
                tensor.copy_(whole(after, key))
        assert again.restore(facts["optimizer"], ()) == []
    assert torch.equal(other.param_groups[0].pop("estimate"), optimizer.param_groups[0].pop("estimate"))
    for key in optimizer.param_groups[0].keys() - {"params"}:
        assert other.param_groups[0][key] == optimizer.param_groups[0][key], key
    assert all(torch.equal(again.tensors()[key], of_optimizer[key]) for key in of_optimizer if "groups/" not in key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_plain_dcp_still_reads_a_checkpoint_with_them(tmp_path: Path) -> None:
    model, _, held = stepped(1)
    tensors = {key: tensor.detach() for key, tensor in {**model_tensors(model), **held.tensors()}.items()}
    source = {
        key: ImportedTensor(external=TorchTensors(tensors), name=key, info=tensor_info(tensors[key])) for key in tensors
    }
    made = Name(step=2, attempt=1, nonce="ab")
    write_checkpoint(LocalStorage(tmp_path), made, source, extra={}, world={"ranks": 1})
    read = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    torch.distributed.checkpoint.load(read, checkpoint_id=tmp_path / str(made), no_dist=True)
    assert all(torch.equal(read[key], tensors[key]) for key in tensors)
    assert any(key.startswith("groups/") for key in read)
