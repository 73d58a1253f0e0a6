"""The model of a sealed checkpoint as a source of weights: for files of others, and for another run's beginning."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from checkpointing.engine.interchange.exporter import SealedCheckpoint
from checkpointing.errors import Refused
from checkpointing.format.manifest import TensorInfo
from trainer.worker.interchange.weights_import import ImportSource
from trainer.worker.saved_state.checkpoint_contents import SHARED_NAMES, buffers_name

MODEL, _BUFFERS = "model/", buffers_name(0)


def model_keys(source: SealedCheckpoint) -> dict[str, str]:
    """The model's own names -> keys; of buffers that differ between ranks those of the first one. Raises Refused."""
    found = {}
    for prefix in (MODEL, _BUFFERS):
        keys = sorted(key for key in source.index.tensors if key.startswith(prefix))
        found.update({key.removeprefix(prefix): key for key in keys})
    if not found:
        raise Refused(source.manifest.name, f"has no tensors of a model (keys that begin with {MODEL})")
    return found


def further_names(source: SealedCheckpoint, known: Mapping[str, str]) -> dict[str, str]:
    """Further names of tensors that the model shares (tied embeddings) -> keys; of a checkpoint that has them noted."""
    noted = source.manifest.extra.get(SHARED_NAMES)
    names = noted if isinstance(noted, dict) else {}
    return {str(name): known[first] for name, first in names.items() if name not in known and first in known}


class CheckpointTensors:
    """The model's tensors under its own names; every byte is verified as it is read."""

    def __init__(self, source: SealedCheckpoint, keys: Mapping[str, str]) -> None:
        self._source, self._keys = source, dict(keys)
        self.tensors: dict[str, TensorInfo] = {name: source.index.tensors[key] for name, key in keys.items()}

    def blocks(self, name: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        return self._source.blocks(self._keys[name])


def weights_of(source: SealedCheckpoint, place: Path) -> ImportSource:
    """The weights alone: no optimizer, no step, no place in the data."""
    keys = model_keys(source)
    fingerprints = {name: source.fingerprints[key] for name, key in keys.items() if key in source.fingerprints}
    return ImportSource(place=place, model=CheckpointTensors(source, keys), fingerprints=fingerprints)
