"""A digest of a model's weights, by which two runs are compared."""

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.worker.saved_state.checkpoint_contents import model_tensors

_HASH_CHUNK = 64 * 1024 * 1024


def weights_digest(model: nn.Module) -> str | None:
    """XXH3-128 over the full tensors in the order of their names: the same in every layout. None but on rank 0.

    A collective: every rank must call it.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model_tensors(model).items()):
        with _no_word_of_speed():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            digest.update(f"{name} {full.dtype} {tuple(full.shape)}\n".encode())
            _feed(digest, full.cpu().contiguous())
    return digest.hexdigest() if dist.get_rank() == 0 else None


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
