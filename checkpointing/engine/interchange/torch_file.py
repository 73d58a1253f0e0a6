"""A torch.save file that is laid out first and filled afterwards: no tensor is ever held whole."""

import mmap
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

from checkpointing.format.torch_record import offset_of, read_at

_NO_RESERVE = 0x4000  # MAP_NORESERVE, which this Python's mmap does not name


def stand_in(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor whose memory is never touched nor charged for, however large it is."""
    numel = torch.Size(shape).numel()
    if not numel:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def lay_out(path: Path, value: Any, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write everything of `value` but the values of its tensors; where those of the `stand_in`s `tensors` go.

    Checksums of records are left out, as torch itself does not look at them.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        with skip_data():
            torch.save(value, path)
    finally:
        set_crc32_options(before)
    records = _records(path)
    order = _order(value)
    assert len(order) == len(records), "torch saves each storage as one record"
    return {name: records[order[tensor.untyped_storage()._cdata]] for name, tensor in tensors.items()}


def _order(value: Any) -> dict[int, int]:
    """Storages of a nested value in the order in which torch numbers them: that of their first occurrence."""
    found: dict[int, int] = {}

    def visit(item: Any) -> None:
        if isinstance(item, Tensor):
            found.setdefault(item.untyped_storage()._cdata, len(found))
        elif isinstance(item, dict):
            for inner in item.values():
                visit(inner)
        else:
            assert item is None or isinstance(item, (str, int, float, list)), "plain values besides tensors"

    visit(value)
    return found


def _records(path: Path) -> list[int]:
    """Where the values of storage 0, 1, ... begin in the file."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        read, size, found = read_at(stream), path.stat().st_size, list[int]()
        while (info := members.get(f"data/{len(found)}")) is not None:
            found.append(offset_of(read, 0, size, info))
    return found
