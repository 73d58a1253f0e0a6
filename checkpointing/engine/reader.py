"""Reads a checkpoint into tensors that are already there: only verified bytes, only known classes."""

import io
import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from checkpointing.digests import digest
from checkpointing.errors import Refused, UnsafePickle
from checkpointing.manifest import METADATA, FileEntry, Manifest
from checkpointing.storage import Storage

_META = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_META, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_META, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class _AllowList(pickle.Unpickler):
    """Builds DCP's metadata classes and torch dtypes, nothing else: no bytes items, no callables of anyone else."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return self._enum_member  # how Python before 3.11.4 pickles the members of an enum
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise UnsafePickle(self._name, f"{METADATA} asks for {module}.{name}, which no checkpoint needs")

    def _enum_member(self, kind: Any, member: str) -> Any:
        if not (isinstance(kind, type) and issubclass(kind, Enum) and member in kind.__members__):
            raise UnsafePickle(self._name, f"{METADATA} asks for an attribute {member!r}, which no checkpoint needs")
        return kind.__members__[member]


class VerifiedFile:
    """Ranges of one file, every chunk compared with its digest as it is read; keeps the last chunk."""

    def __init__(self, stream: BinaryIO, entry: FileEntry, name: str) -> None:
        self._stream, self._entry, self._name = stream, entry, name
        self._held: tuple[int, bytes] = (-1, b"")

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; raises Refused when the file has others, or fewer."""
        size = self._entry.chunk_size
        if offset < 0 or length < 0 or offset + length > self._entry.size:
            raise Refused(self._name, f"{self._entry.name} has no bytes {offset}..{offset + length}")
        pieces = []
        while length > 0:
            start = offset % size
            piece = self._chunk(offset // size)[start : start + length]
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return b"".join(pieces)

    def _chunk(self, index: int) -> bytes:
        if self._held[0] != index:
            start = index * self._entry.chunk_size
            self._stream.seek(start)
            data = self._stream.read(min(self._entry.chunk_size, self._entry.size - start))
            if digest(data) != self._entry.chunks[index]:
                raise Refused(self._name, f"{self._entry.name} chunk {index}: digest differs")
            self._held = (index, data)
        return self._held[1]


def read_metadata(storage: Storage, manifest: Manifest) -> Metadata:
    """Unpickle `.metadata` from verified bytes through the allow-list; raises Refused (UnsafePickle) or OSError."""
    entry = manifest.file(METADATA)
    assert entry is not None
    with storage.open(f"{manifest.name}/{METADATA}") as stream:
        data = VerifiedFile(stream, entry, manifest.name).read(0, entry.size)
    try:
        metadata = _AllowList(data, manifest.name).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise Refused(manifest.name, f"{METADATA} is malformed: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise Refused(manifest.name, f"{METADATA} does not describe a checkpoint")
    return metadata


@dataclass(frozen=True, kw_only=True)
class MayLack:
    """Which keys a checkpoint may be without: those below `alone`, and whole folders directly below `together`.

    A folder is a key up to its last slash: the state that an optimizer keeps for one parameter. A checkpoint that has
    nothing at all below a prefix of `together` lacks more than a folder.
    """

    alone: tuple[str, ...] = ("rng/",)
    together: tuple[str, ...] = ()

    def needed(self, absent: Iterable[str], known: Iterable[str]) -> list[str]:
        """The keys among `absent` that must not be."""
        whole = tuple(prefix for prefix in self.together if any(key.startswith(prefix) for key in known))
        folders = {_folder(key) for key in known}
        rest = [key for key in absent if not key.startswith(self.alone)]
        return [key for key in rest if not key.startswith(whole) or _folder(key) in folders]


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def plan_read(
    name: str, metadata: Metadata, tensors: Mapping[str, Tensor], may_lack: MayLack
) -> tuple[LoadPlan, tuple[str, ...]]:
    """What to read for `tensors`, and the optional keys that are absent; raises Refused before anything is touched."""
    known = metadata.state_dict_metadata
    absent = sorted(key for key in tensors if key not in known)
    needed = may_lack.needed(absent, known)
    if needed:
        more = f" and {len(needed) - 1} more" if len(needed) > 1 else ""
        raise Refused(name, f"has no tensor {needed[0]}{more}")
    wanted = {key: tensor for key, tensor in sorted(tensors.items()) if key in known}
    for key, tensor in wanted.items():
        _check_fit(name, key, known[key], tensor)
    plan = create_default_local_load_plan(wanted, metadata)
    _check_cover(name, plan, wanted)
    return plan, tuple(absent)


def _check_fit(name: str, key: str, saved: Any, tensor: Tensor) -> None:
    if not isinstance(saved, TensorStorageMetadata):
        raise Refused(name, f"{key} is not a tensor in it")
    if tuple(saved.size) != tuple(tensor.size()):
        raise Refused(name, f"{key} has shape {tuple(saved.size)} in it, {tuple(tensor.size())} here")
    if saved.properties.dtype != tensor.dtype:
        raise Refused(name, f"{key} is {saved.properties.dtype} in it, {tensor.dtype} here")


def _check_cover(name: str, plan: LoadPlan, tensors: Mapping[str, Tensor]) -> None:
    """A hole between saved shards would leave old values in a tensor, silently."""
    covered = dict.fromkeys(tensors, 0)
    for item in plan.items:
        covered[item.dest_index.fqn] += math.prod(item.lengths)
    for key, tensor in tensors.items():
        needed = local_part(tensor).numel()
        if covered[key] != needed:
            raise Refused(name, f"{key}: its shards hold {covered[key]} of the {needed} values needed here")


def local_part(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank, detached from autograd."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def read_into(
    storage: Storage, manifest: Manifest, metadata: Metadata, plan: LoadPlan, tensors: Mapping[str, Tensor]
) -> None:
    """Fill the tensors in place; raises Refused or OSError, and may have filled some of them by then."""
    for file, items in _by_file(metadata, plan.items).items():
        entry = manifest.file(file)
        if entry is None:
            raise Refused(manifest.name, f"{METADATA} names {file}, which the manifest does not list")
        with storage.open(f"{manifest.name}/{file}") as stream:
            verified = VerifiedFile(stream, entry, manifest.name)
            for place, group in items:
                saved = _load(verified.read(place.offset, place.length))
                for item in group:
                    _copy_region(manifest.name, saved, item, tensors[item.dest_index.fqn])


def _by_file(metadata: Metadata, items: Iterable[ReadItem]) -> dict[str, list[tuple[Any, list[ReadItem]]]]:
    """Items grouped by saved tensor, in file order: each saved tensor is read once."""
    groups: dict[tuple[str, int], tuple[Any, list[ReadItem]]] = {}
    for item in items:
        place = metadata.storage_data[item.storage_index]
        groups.setdefault((place.relative_path, place.offset), (place, []))[1].append(item)
    files: dict[str, list[tuple[Any, list[ReadItem]]]] = {}
    for file, offset in sorted(groups):
        files.setdefault(file, []).append(groups[file, offset])
    return files


def _load(data: bytes) -> Tensor:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _region(tensor: Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> Tensor:
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def _copy_region(name: str, saved: Tensor, item: ReadItem, target: Tensor) -> None:
    source = _region(saved, item.storage_offsets, item.lengths)
    goal = _region(local_part(target), item.dest_offsets, item.lengths)
    if source.dtype != goal.dtype:
        raise Refused(name, f"{item.dest_index.fqn}: its shard is {source.dtype}, {goal.dtype} here")
    goal.copy_(source)
