"""A sealed checkpoint on one machine, without ranks: whole tensors, every byte verified as it is read."""

from collections.abc import Iterator

import torch
from torch import Tensor

from checkpointing.engine.interchange.external_tensors import spans
from checkpointing.engine.restore.metadata_reader import read_whole_index
from checkpointing.engine.verification.structure import cover_faults
from checkpointing.engine.verification.values import Values
from checkpointing.errors import ManifestError, Refused
from checkpointing.format.index import FINGERPRINTS, parse_fingerprints
from checkpointing.format.manifest import Manifest
from checkpointing.storage.backends import Storage
from checkpointing.verification.verify import read_listed, read_sealed


class SealedCheckpoint:
    """Its structure is sound when this exists; its values are verified as they are read."""

    def __init__(self, storage: Storage, name: str) -> None:
        """Raises Refused or OSError."""
        self.manifest = _sealed(storage, name)
        self.index = read_whole_index(storage, self.manifest)
        listed = {entry.name for entry in self.manifest.files}
        faults = [f"{file} is not listed" for file in sorted({piece.file for piece in self.index.pieces} - listed)]
        faults += [str(fault) for fault in cover_faults(self.index)]
        if faults:
            raise Refused(name, "; ".join(faults[:4]))
        self.fingerprints = _fingerprints(storage, self.manifest)
        self._values = Values(storage, self.manifest, self.index)

    def __enter__(self) -> "SealedCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._values.close()

    def dtype(self, key: str) -> torch.dtype:
        found = getattr(torch, self.index.tensors[key].dtype)
        assert isinstance(found, torch.dtype)  # as the cover was checked
        return found

    def shape(self, key: str) -> tuple[int, ...]:
        return self.index.tensors[key].shape

    def blocks(self, key: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """The whole tensor in the order of its values, in parts with their offsets; raises Refused or OSError."""
        shape = self.shape(key)
        lead = next((at for at, size in enumerate(shape) if size != 1), None)
        for span in spans(shape, self.dtype(key).itemsize):
            if lead is None:
                yield self._values.rows(key, 0, 1), span.offsets
            else:
                start = span.offsets[lead]
                yield self._values.rows(key, start, start + span.sizes[lead]), span.offsets


def _sealed(storage: Storage, name: str) -> Manifest:
    manifest, faults = read_sealed(storage, name)
    if manifest is None or faults:
        raise Refused(name, "; ".join(map(str, faults[:4])))
    return manifest


def _fingerprints(storage: Storage, manifest: Manifest) -> dict[str, str]:
    if manifest.file(FINGERPRINTS) is None:
        return {}
    try:
        return parse_fingerprints(read_listed(storage, manifest, FINGERPRINTS))
    except ManifestError as error:
        raise Refused(manifest.name, str(error)) from error
