"""A digest of a model's weights, by which two runs are compared."""

import ctypes
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.worker.parallel.mesh import Layout
from trainer.worker.saved_state.checkpoint_contents import model_tensors

_HASH_CHUNK = 64 * 1024 * 1024


def weights_digest(model: nn.Module, layout: Layout) -> str | None:
    """XXH3-128 over the full tensors in the order of their names: the same in every layout. None but on rank 0.

    A collective: every rank must call it.
    """
    tensors = _own_tensors(model) if layout.sizes.pp == 1 else _tensors_of_stages(model, layout)
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        if layout.rank == 0:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            _feed(digest, tensor.cpu().contiguous())
    return digest.hexdigest() if layout.rank == 0 else None


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that this rank has, or shards of which it has, whole, by name."""
    for name, tensor in sorted(model_tensors(model).items()):
        with _no_word_of_speed():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _tensors_of_stages(model: nn.Module, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """On rank 0 the tensors of all stages, by name; on the others nothing: they send theirs, one at a time."""
    group, place = layout.pp.get_group(), layout.place.pp
    ranks = dist.get_process_group_ranks(group)
    tensors = {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in model_tensors(model).items()
    }
    known = [
        (*told, stage) for stage, of_stage in enumerate(_gathered(tensors, group, layout)) for told in of_stage.items()
    ]
    own = _own_tensors(model)
    for name, (dtype, shape), stage in sorted(known, key=lambda one: one[0]):
        tensor = next(own)[1] if stage == place else None
        if ranks[0] != 0:
            continue  # one pipeline of several with the same weights is enough
        if place == 0:
            if tensor is None:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=layout.device)
                dist.recv(tensor, ranks[stage], group=group)
            yield name, tensor
        elif tensor is not None:
            dist.send(tensor.to(layout.device).contiguous(), ranks[0], group=group)


def _gathered(told: dict[str, list[Any]], group: dist.ProcessGroup, layout: Layout) -> list[dict[str, list[Any]]]:
    """What each rank of the group tells, as JSON: nobody unpickles what others have sent."""
    text = json.dumps(told).encode()
    size = torch.tensor([len(text)], device=layout.device)
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    row = torch.zeros(max(map(int, sizes)), dtype=torch.uint8, device=layout.device)
    row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = [torch.zeros_like(row) for _ in sizes]
    dist.all_gather(rows, row, group=group)
    return [json.loads(bytes(one[: int(length)].tolist())) for one, length in zip(rows, sizes, strict=True)]


@contextmanager
def _no_word_of_speed() -> Iterator[None]:
    """torch warns in every rank's log that a tensor sharded twice is gathered in two operations: once a run is fine."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _feed(digest: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    size = tensor.numel() * tensor.element_size()
    for start in range(0, size, _HASH_CHUNK):
        digest.update(ctypes.string_at(tensor.data_ptr() + start, min(_HASH_CHUNK, size - start)))
