"""A checkpoint as files for others: safetensors or one torch file, whole tensors, a few rows of one at a time.

Every byte is compared with its digest as it is read. What has been written is read back, and fingerprints of it are
compared with those of the checkpoint: that the files hold the same values is proved, not hoped.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from checkpointing.engine.interchange import torch_file
from checkpointing.engine.interchange.external_tensors import (
    INDEX_FILE,
    ExternalTensors,
    SafetensorsFiles,
    TorchTensors,
    flat,
    load_torch,
    put_values,
)
from checkpointing.engine.interchange.sealed_checkpoint import SealedCheckpoint
from checkpointing.engine.state.fingerprints import combine, partial
from checkpointing.errors import Refused
from checkpointing.format.index import FINGERPRINTS, TensorInfo
from checkpointing.format.safetensors import lay_out
from checkpointing.storage.durable import fsync_dir
from checkpointing.storage.temporary_folder import temporary_folder
from checkpointing.verification.verify import Progress

LARGEST_FILE = 5 * 10**9
"""Bytes of values in one safetensors file; a larger tensor has a file of its own."""


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """One tensor of an export: its key in the checkpoint, its name outside, the dtype that it is converted to."""

    key: str
    name: str
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and the fingerprint of every tensor as it was read back, by its name outside."""

    files: dict[str, int]
    fingerprints: dict[str, str]
    compared: int
    """Tensors whose values were compared with a fingerprint that the checkpoint itself carries."""

    @property
    def size(self) -> int:
        return sum(self.files.values())


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A draft beside `folder` that becomes it at the end, whole and durable; nothing is left when that fails.

    What a killed export into the same folder has left there goes too.

    Raises FileExistsError when `folder` is there and not empty.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there and not empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent, folder.name) as made:
        yield made
        fsync_dir(made)
        os.rename(made, folder)  # over an empty folder too; it raises over one that was filled meanwhile
    fsync_dir(folder.parent)


def write_json(path: Path, value: Any) -> None:
    """One new JSON file for people and programs, durable."""
    with path.open("xb") as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
        _settle(stream)


def write_safetensors(
    source: SealedCheckpoint,
    wanted: Sequence[ExportedTensor],
    folder: Path,
    *,
    largest: int = LARGEST_FILE,
    progress: Progress | None = None,
) -> Exported:
    """`model.safetensors`, or `model-00001-of-0000N.safetensors` with their index; raises Refused or OSError."""
    meter, groups = _Meter(source, wanted, progress), _groups(source, wanted, largest)
    names = [_file_name(number, len(groups)) for number in range(len(groups))]
    handed: dict[str, str] = {}
    for name, group in zip(names, groups, strict=True):
        try:
            head = lay_out({w.name: _outside(source, w) for w in group}, {"format": "pt"})
        except ValueError as error:
            raise Refused(source.manifest.name, f"{error}; a torch file takes it") from error
        with (folder / name).open("xb") as stream:
            stream.write(head.encoded)
            # In the order of their places: each begins where the one before it ended.
            handed.update({w.name: _copied(source, w, stream, meter) for w in group})
            _settle(stream)
    if len(groups) > 1:
        places = {w.name: name for name, group in zip(names, groups, strict=True) for w in group}
        total = sum(_size(source, w) for w in wanted)
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
    found = _read_back(SafetensorsFiles([folder / name for name in names]), {w.name: w.name for w in wanted}, meter)
    return _proved(source, wanted, folder, handed, found)


def write_torch(
    source: SealedCheckpoint,
    wanted: Sequence[ExportedTensor],
    folder: Path,
    *,
    name: str,
    nest: Callable[[Mapping[str, Tensor]], dict[str, Any]],
    progress: Progress | None = None,
) -> Exported:
    """One file for `torch.load(weights_only=True)`; `nest` says how the tensors, by name, stand in its dicts.

    Raises Refused or OSError.
    """
    meter, path = _Meter(source, wanted, progress), folder / name
    blanks = {w.name: torch_file.stand_in(w.dtype, source.shape(w.key)) for w in wanted}
    content = nest(blanks)
    places = torch_file.lay_out(path, content, blanks)
    handed = {}
    with path.open("r+b") as stream:
        for w in wanted:
            stream.seek(places[w.name])
            handed[w.name] = _copied(source, w, stream, meter)
        _settle(stream)
    paths = {id(tensor): at for at, tensor in reversed(list(_paths(content)))}
    found = _read_back(TorchTensors(flat(load_torch(path))), {w.name: paths[id(blanks[w.name])] for w in wanted}, meter)
    return _proved(source, wanted, folder, handed, found)


def _paths(value: Any, before: str = "") -> Iterator[tuple[str, Tensor]]:
    """As `flat` names them, with the very tensors."""
    if isinstance(value, Tensor):
        yield before, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _paths(item, f"{before}/{key}" if before else str(key))


class _Meter:
    """Counts the bytes that were written and those that were read back."""

    def __init__(self, source: SealedCheckpoint, wanted: Sequence[ExportedTensor], progress: Progress | None) -> None:
        self._progress, self._done = progress, 0
        self._total = 2 * sum(_size(source, w) for w in wanted)

    def add(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(self._done, self._total)


def _outside(source: SealedCheckpoint, w: ExportedTensor) -> TensorInfo:
    return TensorInfo(str(w.dtype).removeprefix("torch."), source.shape(w.key))


def _size(source: SealedCheckpoint, w: ExportedTensor) -> int:
    return math.prod(source.shape(w.key)) * w.dtype.itemsize


def _groups(source: SealedCheckpoint, wanted: Sequence[ExportedTensor], largest: int) -> list[list[ExportedTensor]]:
    groups: list[list[ExportedTensor]] = [[]]
    filled = 0
    for w in wanted:
        if groups[-1] and filled + _size(source, w) > largest:
            groups.append([])
            filled = 0
        groups[-1].append(w)
        filled += _size(source, w)
    return groups


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _copied(source: SealedCheckpoint, w: ExportedTensor, stream: BinaryIO, meter: _Meter) -> str:
    """Write one tensor; the fingerprint of what was written.

    Raises Refused when the checkpoint's own fingerprint says that it should hold other values.
    """
    before, after, shape = [], [], source.shape(w.key)
    same = w.dtype == source.dtype(w.key)
    for block, offsets in source.blocks(w.key):
        before.append(partial(block, offsets, shape))
        given = block if same else block.to(w.dtype)
        if not same:
            after.append(partial(given, offsets, shape))
        put_values(stream, given)
        meter.add(given.nbytes)
    found, told = combine(before), source.fingerprints.get(w.key)
    if told is not None and told != found:
        raise Refused(source.manifest.name, f"{w.key} has fingerprint {found}, but {FINGERPRINTS} says {told}")
    return found if same else combine(after)


def _read_back(given: ExternalTensors, names: Mapping[str, str], meter: _Meter) -> dict[str, str]:
    """Fingerprints of what the files hold; `names` maps a name to the one that it has in the files."""
    found = {}
    for name, inside in names.items():
        parts = []
        for block, offsets in given.blocks(inside):
            parts.append(partial(block, offsets, given.tensors[inside].shape))
            meter.add(block.nbytes)
        found[name] = combine(parts)
    return found


def _proved(
    source: SealedCheckpoint,
    wanted: Sequence[ExportedTensor],
    folder: Path,
    handed: Mapping[str, str],
    found: dict[str, str],
) -> Exported:
    for name, fingerprint in handed.items():
        if found.get(name) != fingerprint:
            raise OSError(f"{name} was read back with other values than were written to {folder}")
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return Exported(files=files, fingerprints=found, compared=sum(w.key in source.fingerprints for w in wanted))


def _settle(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
