"""Import of external safetensors and torch files as a committed checkpoint.

It runs on one machine without ranks, a few rows at a time. Bytes are digested as they are written.
"""

import ctypes
import json
import pickle
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from checkpointing.engine.audit.sealed_checkpoint import row_spans
from checkpointing.engine.state.fingerprints import combine, partial
from checkpointing.engine.state.layout import ALIGNMENT, RecordTemplate, region, template
from checkpointing.engine.state.save_plan import metadata_bytes
from checkpointing.errors import CheckpointRefused
from checkpointing.format.commit import Name, seal, write_file
from checkpointing.format.manifest import (
    FINGERPRINTS,
    INDEX,
    METADATA,
    FileEntry,
    Index,
    Manifest,
    Piece,
    TensorInfo,
    encode_fingerprints,
)
from checkpointing.format.safetensors import Malformed, TensorLocation, read_header
from checkpointing.storage.backends import Storage
from checkpointing.storage.digests import DigestSink
from checkpointing.storage.shared_memory import PAGE
from checkpointing.verification.verify import Progress

INDEX_FILE = "model.safetensors.index.json"
_LONGEST_DEPTH = 16
_FOREIGN = re.compile(r"GLOBAL (\S+) was not an allowed global")
_ZIP, _OLD_FORMAT = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of torch.save files: from torch 1.6 onwards, and from earlier releases (a pickled magic number)."""


def tensor_info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def put_values(stream: BinaryIO | DigestSink, block: Tensor) -> None:
    """Write the values of a CPU tensor in row-major order without making another copy of them."""
    if not block.numel():
        return
    flat = block.contiguous()
    stream.write((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


class ExternalTensors(Protocol):
    """Named tensors from external files."""

    tensors: dict[str, TensorInfo]

    def blocks(self, name: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Yield the tensor in parts, in value order, each with its offsets. Raises CheckpointRefused or OSError."""


class SafetensorsFiles:
    """Tensors from one or more safetensors files."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers. Raises CheckpointRefused for a file that violates the format and for a duplicate name."""
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[Path, TensorLocation]] = {}
        for path in files:
            self._add(path)

    def _add(self, path: Path) -> None:
        with path.open("rb") as stream:
            try:
                header = read_header(stream, path.stat().st_size)
            except Malformed as error:
                raise CheckpointRefused(path.name, f"is not a safetensors file: {error}") from error
        twice = sorted(header.tensors.keys() & self.tensors.keys())
        if twice:
            raise CheckpointRefused(path.name, f"{twice[0]} is also in {self._places[twice[0]][0].name}")
        for name, place in header.tensors.items():
            self.tensors[name], self._places[name] = place.info, (path, place)

    def blocks(self, name: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        path, place = self._places[name]
        dtype = getattr(torch, place.info.dtype)
        with path.open("rb") as stream:
            for span in row_spans(place.info.shape, dtype.itemsize):
                stream.seek(place.start + span.start)
                held = bytearray(stream.read(span.nbytes))
                if len(held) != span.nbytes:
                    raise CheckpointRefused(path.name, f"ends within {name}: it was truncated during the import")
                yield torch.frombuffer(held, dtype=torch.uint8).view(dtype).view(span.sizes), span.offsets


class TorchTensors:
    """Tensors from a torch.save file, mapped into memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._held = {name: tensor.detach() for name, tensor in tensors.items()}
        self.tensors = {name: tensor_info(tensor) for name, tensor in tensors.items()}

    def blocks(self, name: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        tensor = self._held[name]
        for span in row_spans(tuple(tensor.shape), tensor.dtype.itemsize):
            yield region(tensor, span.offsets, span.sizes).contiguous(), span.offsets


def open_safetensors(place: Path) -> SafetensorsFiles:
    """Return the tensors in a safetensors file or a Hugging Face folder. Raises CheckpointRefused or OSError."""
    if place.is_file():
        return SafetensorsFiles([place])
    if not (place / INDEX_FILE).exists():
        return SafetensorsFiles(sorted(place.glob("*.safetensors")))
    mapped = _weight_map(place / INDEX_FILE)
    missing = sorted(name for name in set(mapped.values()) if not (place / name).is_file())
    if missing:
        raise CheckpointRefused(INDEX_FILE, f"lists missing files: {', '.join(missing[:4])}")
    found = SafetensorsFiles([place / name for name in sorted(set(mapped.values()))])
    absent = sorted(mapped.keys() - found.tensors.keys())
    if absent:
        raise CheckpointRefused(INDEX_FILE, f"lists {absent[0]}, which is in no file")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    try:
        mapped = json.loads(path.read_bytes())["weight_map"]
        pairs = {str(name): str(file) for name, file in mapped.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointRefused(path.name, f"is malformed: {type(error).__name__}: {error}") from error
    for file in pairs.values():
        if "/" in file or file.startswith("."):
            raise CheckpointRefused(path.name, f"names {file!r}, which is outside the folder")
    return pairs


def load_torch(path: Path) -> Any:
    """Map a torch.save file without running any code in it; return its contents.

    Raises CheckpointRefused or OSError.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointRefused(path.name, _why_not_torch(path, str(error))) from error


def _why_not_torch(path: Path, error_text: str) -> str:
    """Return why torch rejects a file, leaving out torch's own advice to run the code in it."""
    found = _FOREIGN.search(error_text)
    if found is not None:
        return f"holds a pickled object ({found[1]}): save model.state_dict() instead"
    with path.open("rb") as stream:
        head = stream.read(len(_OLD_FORMAT))
    if head.startswith(_ZIP):
        return "is damaged, truncated, or not a torch file"
    if head == _OLD_FORMAT:
        return "is in torch's old file format: load it and torch.save its contents again"
    if head[8:9] == b"{":  # after the length of the header
        return "may be a safetensors file; if so, its name must end in .safetensors"
    return "is not a torch or safetensors file"


def flat(value: Any, before: str = "", depth: int = 0) -> dict[str, Tensor]:
    """Return the tensors in nested dicts, keyed by slash-separated path; other values are left out."""
    if isinstance(value, Tensor):
        return {before: value}
    if not isinstance(value, Mapping) or depth > _LONGEST_DEPTH:
        return {}
    found: dict[str, Tensor] = {}
    for key, item in value.items():
        found.update(flat(item, f"{before}/{key}" if before else str(key), depth + 1))
    return found


FILE_BYTES = 16 << 30
"""Size in bytes at which a checkpoint file is closed and the next one begins."""


@dataclass(frozen=True, kw_only=True)
class ImportedTensor:
    """A tensor in the new checkpoint and its source; rows missing from the source become zeros."""

    external: ExternalTensors
    name: str
    info: TensorInfo
    expected_fingerprint: str | None = None
    """Fingerprint that the source's exporter recorded for it."""

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.info.dtype)
        assert isinstance(found, torch.dtype)
        return found


def write_checkpoint(
    storage: Storage,
    name: Name,
    tensors: Mapping[str, ImportedTensor],
    *,
    extra: dict[str, Any],
    world: dict[str, Any],
    progress: Progress | None = None,
) -> Manifest:
    """Write and commit a checkpoint; the caller removes debris. Raises OSError or CheckpointRefused."""
    writer = _Writer(storage, str(name), tensors, progress)
    for key in sorted(tensors, key=lambda key: (-writer.template(key).nbytes, key)):
        writer.add(key)
    files = [*writer.finish()]
    index = Index({key: imported.info for key, imported in tensors.items()}, tuple(writer.pieces))
    described = {
        INDEX: index.encode(), FINGERPRINTS: encode_fingerprints(writer.fingerprints), METADATA: encode_metadata(index)
    }  # fmt: skip
    for file, data in described.items():
        files.append(write_file(storage, str(name), file, data))
    now = time.time()
    manifest = Manifest(
        name=str(name), step=name.step, attempt=name.attempt, nonce=name.nonce, created_at=now,
        torch=torch.__version__, world=world, files=tuple(files), extra=extra,
    )  # fmt: skip
    seal(storage, manifest, lambda: True, now)
    return manifest


def encode_metadata(index: Index) -> bytes:
    """Return DCP's `.metadata` for the files of an index."""
    tensors = {
        key: TensorStorageMetadata(TensorProperties(dtype=getattr(torch, info.dtype)), torch.Size(info.shape), [])
        for key, info in index.tensors.items()
    }
    # As in DCP for a flat state dict: tools that rebuild a nested dict look up the key's path here.
    metadata = Metadata(state_dict_metadata={**tensors}, planner_data={key: (key,) for key in tensors})
    return metadata_bytes(metadata, index.pieces)


class _Writer:
    def __init__(
        self, storage: Storage, folder: str, tensors: Mapping[str, ImportedTensor], progress: Progress | None
    ) -> None:
        self._storage, self._folder, self._tensors, self._progress = storage, folder, tensors, progress
        self._total, self._done = sum(self.template(key).nbytes for key in tensors), 0
        self._sink: DigestSink | None = None
        self._name = ""
        self._files: list[FileEntry] = []
        self.pieces: list[Piece] = []
        self.fingerprints: dict[str, str] = {}

    def template(self, key: str) -> RecordTemplate:
        imported = self._tensors[key]
        return template(imported.dtype, imported.info.shape)

    def add(self, key: str) -> None:
        """Write one tensor into the current file."""
        around, shape = self.template(key), self._tensors[key].info.shape
        sink = self._open()
        sink.write(bytes(-sink.size % ALIGNMENT))  # pads so that the record's values are aligned
        start = sink.size
        try:
            sink.write(around.head)
            self._values(key, sink)
            sink.write(around.tail)
        except (CheckpointRefused, OSError):
            sink.__exit__(OSError, None, None)  # abandoned without waiting for the disk
            raise
        data = start + len(around.head)
        zero = (0,) * len(shape)
        self.pieces.append(Piece(key, self._name, zero, shape, start, around.length, data, around.nbytes))
        if sink.size >= FILE_BYTES:
            self._close()

    def finish(self) -> list[FileEntry]:
        self._close()
        return self._files

    def _open(self) -> DigestSink:
        if self._sink is None:
            self._name = f"__0_{len(self._files)}.distcp"
            self._sink = DigestSink(self._storage.create(f"{self._folder}/{self._name}"))
        return self._sink

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        with sink:
            sink.write(bytes(-sink.size % PAGE))
        self._files.append(FileEntry(name=self._name, size=sink.size, chunks=sink.chunks))

    def _values(self, key: str, sink: DigestSink) -> None:
        imported = self._tensors[key]
        before, after = [], []
        for external, block, offsets in _blocks(imported):
            if external is not None:
                before.append(partial(external, offsets, imported.external.tensors[imported.name].shape))
            after.append(partial(block, offsets, imported.info.shape))
            put_values(sink, block)
            self._done += block.nbytes
            if self._progress:
                self._progress(self._done, self._total)
        found = combine(before)
        if imported.expected_fingerprint not in (None, found):
            reason = f"its values have fingerprint {found}, but its export recorded {imported.expected_fingerprint}"
            raise CheckpointRefused(imported.name, reason)
        self.fingerprints[key] = combine(after)


def _blocks(imported: ImportedTensor) -> Iterator[tuple[Tensor | None, Tensor, tuple[int, ...]]]:
    """Yield each block as read and as written, with its offsets: the source's rows, then zeros for missing rows."""
    for block, offsets in imported.external.blocks(imported.name):
        yield block, block.to(imported.dtype), offsets
    have, want = imported.external.tensors[imported.name].shape, imported.info.shape
    if have != want:
        assert have[1:] == want[1:], "only rows can be missing"
        assert have[0] < want[0], "only rows can be missing"
        for span in row_spans((want[0] - have[0], *want[1:]), imported.dtype.itemsize):
            offsets = (span.offsets[0] + have[0], *span.offsets[1:])
            yield None, torch.zeros(span.sizes, dtype=imported.dtype, device="cpu"), offsets
