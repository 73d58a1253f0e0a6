"""The interface of a parallel dimension, and the parts of a job's configuration that every dimension reads."""

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from trainer.protocol.config_sections.recipe_config import ClusterShape, ModelConfig, TrainConfig

Fix = dict[str, Any]
"""Config keys and values to set together."""


class Splits(Enum):
    """The part of a training step that a dimension divides, which decides the tokens and the state that a rank has."""

    LAYERS = "layers"
    BATCH = "batch"
    SEQUENCE = "sequence"
    MATRICES = "matrices"
    EXPERTS = "experts"


class Recipe(Protocol):
    """The parts of `JobConfig` that determine whether a layout fits; `parallel` is the `ParallelConfig`."""

    @property
    def command(self) -> tuple[str, ...]: ...
    @property
    def parallel(self) -> Any: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def cluster(self) -> ClusterShape: ...
    @property
    def trains_built_in_workload(self) -> bool: ...


class Section:
    """Base class of a dimension's config section, whose fields are keys of `parallel`."""

    def check(self) -> None:
        """Raise ValueError for values that no layout can have."""


class Dimension:
    """One way to divide a model or its data among ranks.

    Each dimension has a file with its config section and an instance of a subclass, and entries in
    `trainer/parallel/parallel_config.py`. Methods take the `ParallelConfig`, or the job's `Recipe`.
    """

    name: str
    """Name of the mesh dimension."""
    key: str
    """Config key of its size, below `parallel`."""
    splits: Splits
    torch_module = ""
    """Module in `trainer/parallel/apply/` whose `apply(model, layout, config)` divides the built-in model, on the meta
    device, among the ranks of a layout; the login node never imports it. Empty if there is nothing to apply."""
    sends_messages = False
    """Whether ranks send tensors to individual ranks, and not only in collectives."""

    def size(self, parallel: Any) -> int:
        """Return the number of ranks along this dimension."""
        size: int = getattr(parallel, self.key)
        return size

    def mesh(self, parallel: Any, data_ranks: int) -> dict[str, int]:
        """Return this dimension's part of the mesh; `data_ranks`: ranks that read different data."""
        return {self.name: self.size(parallel)}

    def describe(self, name: str, size: int) -> str:
        """Describe a size in a product of sizes; return an empty string to omit it."""
        return f"{name}={size}" if size > 1 else ""

    def problems(self, job: Recipe) -> Iterator[str]:
        """Yield the reasons why the job cannot have this size; the sizes already multiply to the world size."""
        yield from ()

    def resize(self, parallel: Any, size: int) -> Fix:
        """Return the keys that give this dimension a different size."""
        return {f"parallel.{self.key}": size}

    def relaxations(self, job: Recipe) -> Fix:
        """Return settings, other than sizes, that remove some of the problems."""
        return {}

    def place(self, rank: int, parallel: Any) -> str:
        """Describe the position of `rank` in a dimension outside the mesh; empty for dimensions of the mesh."""
        return ""


def mesh_coordinates(sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the index of `rank` in each dimension of a mesh, outermost first; outer dimensions may be omitted."""
    place: list[int] = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        place.append(index)
    return tuple(reversed(place))


def locate_rank(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return the index of `rank` in each dimension of a mesh, keyed by name."""
    return dict(zip(sizes, mesh_coordinates(tuple(sizes.values()), rank), strict=True))


def join_alternatives(words: Sequence[str]) -> str:
    """Join words as `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def check_size(name: str, size: int, least: int = 1) -> None:
    """Raise ValueError if a size is below its minimum."""
    if size < least:
        raise ValueError(f"parallel.{name}={size}: must be at least {least}: type parallel.{name}={least}")


def divisors(whole: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [number for number in range(1, math.isqrt(whole) + 1) if whole % number == 0]
    return sorted({*small, *(whole // number for number in small)})
