"""Which tokens of every sequence a rank has, when several ranks share each of them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

from trainer.contract.config_sections.parallel_config import CpMethod, ParallelConfig
from trainer.contract.layout.context_parallel import chunks_per_rank, padded_length


@dataclass(frozen=True, kw_only=True)
class SequencePart:
    """Some chunks of a sequence, in its order; the last ones of a length that does not divide hold padding."""

    length: int
    """Tokens of the whole sequence, without padding."""

    ranks: int
    """How many of them share it."""

    chunk: int
    """Tokens of one chunk."""

    chunks: tuple[int, ...]
    """The numbers of those of this rank."""

    @cached_property
    def positions(self) -> torch.Tensor:
        """The places of this rank's tokens in the sequence, int64; those of padding lie behind its end."""
        return torch.cat([torch.arange(number * self.chunk, (number + 1) * self.chunk) for number in self.chunks])

    @property
    def real(self) -> int:
        """How many of this rank's tokens are no padding: the first ones."""
        return int((self.positions < self.length).sum())

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of whole rows [batch, length]; padding is 0."""
        missing = max(0, (max(self.chunks) + 1) * self.chunk - self.length)
        padded = functional.pad(tokens, (0, missing))
        return torch.cat([padded[:, number * self.chunk : (number + 1) * self.chunk] for number in self.chunks], dim=1)

    def rows_of(self, table: torch.Tensor) -> torch.Tensor:
        """Of a table [.., length, ..] with a row for each place, those of this rank; padding has any of them."""
        places = self.positions.clamp(max=self.length - 1).to(table.device)
        return table.index_select(1, places)


def sequence_part(length: int, parallel: ParallelConfig, method: CpMethod, rank: int) -> SequencePart:
    """That of the `rank`th of `parallel.cp` ranks.

    In a ring each rank has one chunk of the head and one of the tail of a sequence: with a causal mask a token has the
    more work the later it comes, and so all ranks have the same.
    """
    ranks, each = parallel.cp, chunks_per_rank(method)
    chunk = padded_length(length, parallel, method) // (ranks * each)
    chunks = (rank, 2 * ranks - 1 - rank) if method is CpMethod.RING else (rank,)
    return SequencePart(length=length, ranks=ranks, chunk=chunk, chunks=chunks)
