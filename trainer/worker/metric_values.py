"""Scalars that a workload returns from `metrics` and `validate`, and how those of all ranks become one number."""

from dataclasses import dataclass

import torch

Number = float | int | torch.Tensor
"""A number, or a tensor with one element."""


@dataclass(frozen=True)
class Mean:
    """The mean over the data-parallel ranks, weighted (by the number of samples, say); a bare number is one too."""

    value: Number
    weight: Number = 1.0


@dataclass(frozen=True)
class Sum:
    """The sum over the data-parallel ranks; ranks that read the same data count once, with the mean of theirs."""

    value: Number


@dataclass(frozen=True)
class Rank0:
    """The number of rank 0 alone."""

    value: Number


Metric = Number | Mean | Sum | Rank0 | None
"""None: no value this time."""
