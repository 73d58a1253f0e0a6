"""Exports contain every name of a shared tensor, so that strict `load_state_dict` accepts them."""

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpointing.engine.interchange.importer import (
    ImportedTensor,
    SafetensorsFiles,
    TorchTensors,
    tensor_info,
    write_checkpoint,
)
from checkpointing.format.commit import Name
from checkpointing.storage.backends import LocalStorage
from trainer.models.checkpoint_export import ExportRequest, export
from trainer.worker.saved_state.checkpoint_contents import SHARED_NAMES, model_tensors, shared_names


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.second = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(3, 7)
        self.head.weight = self.second.weight = self.embedding.weight
        self.register_buffer("scale", torch.arange(3.0))
        self.second.register_buffer("scale", self.scale)
        self.second.register_buffer("scratch", self.scale, persistent=False)


SHARED = {"head.weight": "embedding.weight", "second.weight": "embedding.weight", "second.scale": "scale"}


def saved(folder: Path, model: nn.Module, extra: dict[str, object]) -> tuple[LocalStorage, str]:
    tensors = {key: tensor.detach() for key, tensor in model_tensors(model).items()}
    source = {
        key: ImportedTensor(external=TorchTensors(tensors), name=key, info=tensor_info(tensors[key])) for key in tensors
    }
    made, storage = Name(step=2, attempt=1, nonce="ab"), LocalStorage(folder)
    write_checkpoint(storage, made, source, extra={"step": 2, **extra}, world={"ranks": 1})
    return storage, str(made)


def of_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "model.safetensors"
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    files = SafetensorsFiles([file])
    names = json.loads(file.read_bytes()[8 : 8 + length]).keys() - {"__metadata__"}
    shapes = {name: files.tensors[name].shape for name in names}
    return {name: torch.cat([b.flatten() for b, _ in files.blocks(name)]).reshape(shapes[name]) for name in names}


def test_names_of_shared_tensors_are_facts_of_a_checkpoint() -> None:
    assert shared_names(Tied()) == SHARED
    assert shared_names(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_an_export_of_a_tied_model_loads_strictly(to: str, tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    storage, name = saved(tmp_path / "run", model, {SHARED_NAMES: shared_names(model)})
    export(storage, name, ExportRequest(to=to, folder=tmp_path / "out"))
    if to == "torch":
        state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"]
    else:
        state = of_safetensors(tmp_path / "out")
    other.load_state_dict(state)
    assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("noted", [None, {}, "nonsense", {"head.weight": "gone"}])
def test_a_checkpoint_without_such_facts_is_exported_as_it_is(noted: object, tmp_path: Path) -> None:
    storage, name = saved(tmp_path / "run", Tied(), {} if noted is None else {SHARED_NAMES: noted})
    export(storage, name, ExportRequest(to="torch", folder=tmp_path / "out"))
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"]
    assert state.keys() == {"embedding.weight", "scale", "second.bias"}
