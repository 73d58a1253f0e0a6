"""Export of a checkpoint to safetensors files or a single torch file, a few rows at a time.

Every byte is compared with its digest as it is read. The files are then read back, and their fingerprints are compared
with those of the values written.
"""

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor
from torch.serialization import skip_data

from checkpointing.engine.audit.audit import cover_faults
from checkpointing.engine.audit.sealed_checkpoint import SealedCheckpoint
from checkpointing.engine.interchange.importer import (
    INDEX_FILE,
    ExternalTensors,
    SafetensorsFiles,
    TorchTensors,
    flat,
    load_torch,
    put_values,
)
from checkpointing.engine.state.fingerprints import combine, partial
from checkpointing.engine.state.layout import placeholder_tensor, without_checksums
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import FINGERPRINTS, Manifest, TensorInfo
from checkpointing.format.safetensors import lay_out
from checkpointing.format.torch_record import make_reader, member_offset
from checkpointing.storage.backends import Storage
from checkpointing.storage.durable import fsync_dir, temporary_folder
from checkpointing.verification.verify import Progress


def lay_out_torch_file(path: Path, value: Any, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write all of `value` except its tensors' values; return the file offset of each tensor's values.

    Record checksums are omitted, because torch itself does not check them.
    """
    with without_checksums(), skip_data():
        torch.save(value, path)
    records = _records(path)
    # torch numbers storages in order of first occurrence.
    storages = list(dict.fromkeys(tensor.untyped_storage()._cdata for tensor in flat(value).values()))
    places = dict(zip(storages, records, strict=True))
    return {name: places[tensor.untyped_storage()._cdata] for name, tensor in tensors.items()}


def _records(path: Path) -> list[int]:
    """Return the file offsets of the storages' values, in the order of their numbers."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        read, size, found = make_reader(stream), path.stat().st_size, list[int]()
        while (info := members.get(f"data/{len(found)}")) is not None:
            found.append(member_offset(read, 0, size, info))
    return found


def open_for_export(storage: Storage, name: str) -> SealedCheckpoint:
    """Open a checkpoint after checking that its tensors are complete. Raises CheckpointRefused or OSError."""
    source = SealedCheckpoint.open(storage, name)
    listed = {entry.name for entry in source.manifest.files}
    faults = [f"{file} is not listed" for file in sorted({piece.file for piece in source.index.pieces} - listed)]
    faults += [str(fault) for fault in cover_faults(source.index)]
    if faults:
        raise CheckpointRefused(name, "; ".join(faults[:4]))
    return source


SINGLE_FILE = "model.safetensors"
LARGEST_FILE = 5 * 10**9
"""Maximum bytes of values in one safetensors file; a larger tensor gets its own file."""


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """A tensor to export: its key in the checkpoint, its exported name, and the target dtype."""

    key: str
    name: str
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The files written, and each tensor's fingerprint as read back, keyed by exported name."""

    files: dict[str, int]
    fingerprints: dict[str, str]
    compared: int
    """Number of tensors whose values were checked against a fingerprint from the checkpoint."""

    @property
    def size(self) -> int:
        return sum(self.files.values())


class ExportSource(Protocol):
    """Checkpoint whose tensors are exported."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def fingerprints(self) -> Mapping[str, str]: ...
    def dtype(self, key: str) -> torch.dtype: ...
    def shape(self, key: str) -> tuple[int, ...]: ...
    def blocks(self, key: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]: ...


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a draft next to `folder` that replaces it on exit, complete and durable. A failure leaves nothing behind.

    Leftovers from a killed export to the same folder are also removed.

    Raises FileExistsError if `folder` exists and is not empty.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists and is not empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent, folder.name) as made:
        yield made
        fsync_dir(made)
        os.rename(made, folder)  # replaces an empty folder; raises if it is no longer empty
    fsync_dir(folder.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a new, indented JSON file durably."""
    write_bytes(path, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file durably."""
    with path.open("xb") as stream:
        stream.write(data)
        _settle(stream)


def write_safetensors(
    source: ExportSource,
    wanted: Sequence[ExportedTensor],
    folder: Path,
    *,
    largest: int = LARGEST_FILE,
    progress: Progress | None = None,
) -> Exported:
    """Write `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index.

    Raises CheckpointRefused or OSError.
    """
    meter, groups = _Meter(source, wanted, progress), _groups(source, wanted, largest)
    names = [_file_name(number, len(groups)) for number in range(len(groups))]
    handed: dict[str, str] = {}
    for name, group in zip(names, groups, strict=True):
        try:
            head = lay_out({w.name: _outside(source, w) for w in group}, {"format": "pt"})
        except ValueError as error:
            raise CheckpointRefused(source.manifest.name, f"{error}; a torch file can hold it") from error
        with (folder / name).open("xb") as stream:
            stream.write(head.encoded)
            # Copied in file order, so each tensor begins where the previous one ends.
            handed.update({w.name: _copy_tensor(source, w, stream, meter) for w in group})
            _settle(stream)
    if len(groups) > 1:
        places = {w.name: name for name, group in zip(names, groups, strict=True) for w in group}
        total = sum(_size(source, w) for w in wanted)
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
    found = _read_back(SafetensorsFiles([folder / name for name in names]), {w.name: w.name for w in wanted}, meter)
    return _verify_export(source, wanted, folder, handed, found)


def write_torch(
    source: ExportSource,
    wanted: Sequence[ExportedTensor],
    folder: Path,
    *,
    name: str,
    nest: Callable[[Mapping[str, Tensor]], dict[str, Any]],
    progress: Progress | None = None,
) -> Exported:
    """Write one file for `torch.load(weights_only=True)`; `nest` arranges the named tensors in dicts.

    Raises CheckpointRefused or OSError.
    """
    meter, path = _Meter(source, wanted, progress), folder / name
    blanks = {w.name: placeholder_tensor(w.dtype, source.shape(w.key)) for w in wanted}
    content = nest(blanks)
    places = lay_out_torch_file(path, content, blanks)
    handed = {}
    with path.open("r+b") as stream:
        for w in wanted:
            stream.seek(places[w.name])
            handed[w.name] = _copy_tensor(source, w, stream, meter)
        _settle(stream)
    paths = {id(tensor): at for at, tensor in reversed(flat(content).items())}
    found = _read_back(TorchTensors(flat(load_torch(path))), {w.name: paths[id(blanks[w.name])] for w in wanted}, meter)
    return _verify_export(source, wanted, folder, handed, found)


class _Meter:  # counts the bytes written and read back
    def __init__(self, source: ExportSource, wanted: Sequence[ExportedTensor], progress: Progress | None) -> None:
        self._progress, self._done = progress, 0
        self._total = 2 * sum(_size(source, w) for w in wanted)

    def add(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(self._done, self._total)


def _outside(source: ExportSource, w: ExportedTensor) -> TensorInfo:
    return TensorInfo(str(w.dtype).removeprefix("torch."), source.shape(w.key))


def _size(source: ExportSource, w: ExportedTensor) -> int:
    return math.prod(source.shape(w.key)) * w.dtype.itemsize


def _groups(source: ExportSource, wanted: Sequence[ExportedTensor], largest: int) -> list[list[ExportedTensor]]:
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
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _copy_tensor(source: ExportSource, w: ExportedTensor, stream: BinaryIO, meter: _Meter) -> str:
    """Write one tensor; return the fingerprint of the written values.

    Raises CheckpointRefused if the checkpoint's own fingerprint differs from the values read.
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
    found, saved = combine(before), source.fingerprints.get(w.key)
    if saved is not None and saved != found:
        raise CheckpointRefused(
            source.manifest.name, f"{w.key} has fingerprint {found}, but {FINGERPRINTS} records {saved}"
        )
    return found if same else combine(after)


def _read_back(given: ExternalTensors, names: Mapping[str, str], meter: _Meter) -> dict[str, str]:
    """Return the fingerprints of the files' contents; `names` maps exported names to names in the files."""
    found = {}
    for name, inside in names.items():
        parts = []
        for block, offsets in given.blocks(inside):
            parts.append(partial(block, offsets, given.tensors[inside].shape))
            meter.add(block.nbytes)
        found[name] = combine(parts)
    return found


def _verify_export(
    source: ExportSource,
    wanted: Sequence[ExportedTensor],
    folder: Path,
    handed: Mapping[str, str],
    found: dict[str, str],
) -> Exported:
    for name, fingerprint in handed.items():
        if found.get(name) != fingerprint:
            raise OSError(f"the values of {name} read back from {folder} differ from those written")
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return Exported(files=files, fingerprints=found, compared=sum(w.key in source.fingerprints for w in wanted))


def _settle(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
