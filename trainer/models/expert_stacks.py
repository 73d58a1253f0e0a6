"""Experts of Hugging Face's files, one matrix each, and the stacks in which the built-in model has them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from checkpointing.engine.audit.sealed_checkpoint import SealedCheckpoint
from checkpointing.engine.interchange.importer import ExternalTensors
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import Manifest, TensorInfo

_MATRIX = re.compile(r"(?P<stack>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>w[123])\.weight")
_TRANSPOSED = "w2"
"""Matrix that the built-in model stores transposed."""


def expert_name(stack: str, expert: int) -> str:
    """Return a file's name for one expert of the stack `...experts.w1`."""
    place, _, matrix = stack.rpartition(".")
    return f"{place}.{expert}.{matrix}.weight"


class StackedExperts:
    """Tensors of a file, with each layer's experts as stacks, and zeros as the routers' adjustments."""

    def __init__(self, given: ExternalTensors) -> None:
        self._given = given
        self._stacks: dict[str, int] = {}
        for name in given.tensors:
            if found := _MATRIX.fullmatch(name):
                stack = f"{found['stack']}.{found['matrix']}"
                self._stacks[stack] = max(self._stacks.get(stack, 0), int(found["expert"]) + 1)
        self.tensors = {name: info for name, info in given.tensors.items() if not _MATRIX.fullmatch(name)}
        for stack, count in self._stacks.items():
            info = self._info(stack, 0)
            self.tensors[stack] = TensorInfo(info.dtype, (count, *info.shape))
            moves = stack.removesuffix(stack[-3:]).removesuffix(".experts") + ".moves"
            self.tensors[moves] = TensorInfo("int64", (count,))

    def _info(self, stack: str, expert: int) -> TensorInfo:
        name = expert_name(stack, expert)
        if name not in self._given.tensors:
            raise CheckpointRefused(name, "is missing, but later experts of its layer are there")
        info = self._given.tensors[name]
        return TensorInfo(info.dtype, info.shape[::-1]) if stack.endswith(_TRANSPOSED) else info

    def blocks(self, name: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        if name not in self._stacks:
            if name in self._given.tensors:
                yield from self._given.blocks(name)
            else:
                yield torch.zeros(self.tensors[name].shape, dtype=torch.int64, device="cpu"), (0,)
            return
        for expert in range(self._stacks[name]):
            info = self._info(name, expert)
            if info.shape != self.tensors[name].shape[1:] or info.dtype != self.tensors[name].dtype:
                raise CheckpointRefused(expert_name(name, expert), "differs in shape or type from the first expert")
            matrix = torch.cat([block.flatten() for block, _ in self._given.blocks(expert_name(name, expert))])
            shape = self._given.tensors[expert_name(name, expert)].shape
            matrix = matrix.view(shape)
            yield (matrix.T if name.endswith(_TRANSPOSED) else matrix).contiguous()[None], (expert, 0, 0)


class SplitExperts:
    """A checkpoint whose expert stacks can also be read as single matrices, under the keys `STACK#EXPERT`."""

    def __init__(self, source: SealedCheckpoint) -> None:
        self._source, self._held = source, ("", torch.empty(0, device="cpu"))

    @property
    def manifest(self) -> Manifest:
        return self._source.manifest

    @property
    def fingerprints(self) -> Mapping[str, str]:
        return self._source.fingerprints

    def dtype(self, key: str) -> torch.dtype:
        return self._source.dtype(key.partition("#")[0])

    def shape(self, key: str) -> tuple[int, ...]:
        stack, _, expert = key.partition("#")
        shape = self._source.shape(stack)
        if not expert:
            return shape
        return shape[:0:-1] if stack.endswith(_TRANSPOSED) else shape[1:]

    def blocks(self, key: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        stack, _, expert = key.partition("#")
        if not expert:
            yield from self._source.blocks(key)
            return
        matrix = self._read(stack)[int(expert)]
        yield (matrix.T if stack.endswith(_TRANSPOSED) else matrix).contiguous(), (0, 0)

    def _read(self, stack: str) -> Tensor:
        """Return a whole stack, of which one is kept in memory."""
        if self._held[0] != stack:
            parts = [block.flatten() for block, _ in self._source.blocks(stack)]
            self._held = stack, torch.cat(parts).view(self._source.shape(stack))
        return self._held[1]


def any_moves(source: Any, keys: Mapping[str, str]) -> bool:
    """Return whether load balancing has adjusted a router, which no file of transformers can express."""
    moves = [key for name, key in keys.items() if name.endswith("router.moves")]
    return any(bool(block.any()) for key in moves for block, _ in source.blocks(key))
