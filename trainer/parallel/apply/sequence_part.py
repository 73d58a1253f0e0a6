"""Shared sequences: the part of each sequence on a rank, and the interface for attention over all parts."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class SequencePart:
    """Chunks of a sequence on a rank, in order; the last ones contain padding if the length does not divide evenly."""

    length: int
    """Tokens of the whole sequence, without padding."""

    ranks: int
    """Number of ranks that share the sequence."""

    chunk: int
    """Tokens per chunk."""

    chunks: tuple[int, ...]
    """Indices of this rank's chunks."""

    @cached_property
    def positions(self) -> torch.Tensor:
        """Return the positions of this rank's tokens in the sequence, int64; padding has positions past its end."""
        return torch.cat(
            [torch.arange(number * self.chunk, (number + 1) * self.chunk, device="cpu") for number in self.chunks]
        )

    @property
    def real(self) -> int:
        """Return the number of this rank's tokens that are not padding; these come first."""
        return int((self.positions < self.length).sum())

    def select_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of whole rows [batch, length]; padding is 0."""
        missing = max(0, (max(self.chunks) + 1) * self.chunk - self.length)
        padded = functional.pad(tokens, (0, missing))
        return torch.cat([padded[:, number * self.chunk : (number + 1) * self.chunk] for number in self.chunks], dim=1)

    def select_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a table [.., length, ..] with one row per position; padding gets the last row."""
        places = self.positions.clamp(max=self.length - 1).to(table.device)
        return table.index_select(1, places)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Return causal attention of [batch, heads, length, width]; `key` and `value` may have fewer heads.

    With a window, each token attends to so many tokens, itself included.
    """
    if not window:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    places = torch.arange(query.shape[2], device=query.device)
    distance = places[:, None] - places
    mask = (distance >= 0) & (distance < window)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


class SequenceAttention:
    """Base class of causal attention over sequences that several ranks share; replaces a layer's `attend`."""

    dimension: str
    """Name of the mesh dimension of these ranks."""

    @property
    def sent_bytes(self) -> int:
        """Return the bytes sent to individual ranks since the start, which gloo does not record."""
        return 0

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with `query` [batch, heads, tokens, width] of this rank; `key` and `value` may have fewer heads."""
        raise NotImplementedError


def find_shared_attention(model: nn.Module) -> SequenceAttention | None:
    """Return the attention with which `model` shares sequences, or None."""
    found = (getattr(module, "attend", None) for module in model.modules())
    return next((attend for attend in found if isinstance(attend, SequenceAttention)), None)
