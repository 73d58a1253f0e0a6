"""Batches from token shards in an order that depends only on the seed, and detection of random draws by DataLoaders."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from trainer.parallel.data import batch_problems
from trainer.protocol.config_sections.recipe_config import TrainConfig
from trainer.protocol.token_shards import TokenIndex

_ROUNDS = 6
_MASK = (1 << 64) - 1


class Data(Protocol):
    """A rank's data. A checkpoint stores its position.

    If the data has a `fingerprint` (a string), training can only continue with data that has the same fingerprint. If
    it has `tokens_per_step` (a sum over all ranks), tokens per second are recorded.
    """

    consumed: int

    def take(self) -> Sequence[Any]:
        """Return this rank's micro-batches for the next optimizer step, on its device, and advance the position."""

    def seek(self, consumed: int) -> None:
        """Go to the position saved in a checkpoint: the number of sequences that all ranks have consumed together."""


class StatefulData(Protocol):
    """Data whose position is more than a number. A checkpoint stores the state of each data-parallel rank."""

    def take(self) -> Sequence[Any]:
        """Return the next micro-batches like `Data.take`."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: numbers, strings, tensors, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`.

        To restart with a different number of data-parallel ranks, define `load_state_dicts(states)`, which receives the
        states of all ranks in order.
        """


class CountedData:
    """Stateful data with a position, the number of steps taken."""

    def __init__(self, data: StatefulData) -> None:
        self.data, self.consumed = data, 0
        self.fingerprint = getattr(data, "fingerprint", None)
        self.tokens_per_step = getattr(data, "tokens_per_step", None)

    def take(self) -> Sequence[Any]:
        batches = self.data.take()
        self.consumed += 1
        return batches

    def seek(self, consumed: int) -> None:
        """Set only the position, because the state is restored separately.

        Without a state in the checkpoint, only the data's own `seek` can restore the position.
        """
        self.consumed = consumed


def with_position(data: Any) -> Data:
    """Return the data, wrapped in CountedData if it has no position."""
    return data if hasattr(data, "consumed") else CountedData(data)


def unwrap_data(data: Data) -> Data | StatefulData:
    """Return the object that `build_data` returned."""
    return data.data if isinstance(data, CountedData) else data


class Positions:
    """Batch positions that are unique, even if the data's `consumed` restarts in every epoch."""

    def __init__(self, data: Data) -> None:
        self._data, self._offset = data, 0

    @property
    def next(self) -> int:
        """Return the position of the next batch."""
        return self._offset + int(self._data.consumed)  # user data may use a tensor

    def seek(self, position: int) -> None:
        """Set the position of the next batch, regardless of the data's own position."""
        self._offset = position - int(self._data.consumed)

    def take(self, skip: Collection[int]) -> tuple[int, Sequence[Any]]:
        """Return the position of the next batch that is not skipped, and the batch itself.

        Skipped batches are taken and dropped, which works for any kind of data.
        """
        while self.next in skip:
            self._take()
        return self.next, self._take()

    def _take(self) -> Sequence[Any]:
        before, batches = self.next, self._data.take()
        if self.next <= before:
            self.seek(before + 1)
        return batches


def mix(value: int) -> int:
    """Apply the SplitMix64 finalizer (Steele, Lea, Flood 2014), a bijection of 64-bit numbers that mixes every bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Permutation:
    """Seeded permutation of range(size) without a table: a Feistel network, iterated until the result is in range."""

    size: int
    seed: int

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.size
        half = max(1, ((self.size - 1).bit_length() + 1) // 2)
        keys = [mix(mix(self.seed) ^ turn) for turn in range(_ROUNDS)]
        while True:  # the network permutes 4**half numbers, fewer than 4 x size, so at most four rounds on average
            left, right = index >> half, index & ((1 << half) - 1)
            for key in keys:
                left, right = right, left ^ (mix(right ^ key) & ((1 << half) - 1))
            index = left << half | right
            if index < self.size:
                return index


class TokenStream:
    """The shards of a folder as one sequence of tokens, mapped read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, TokenIndex.read(folder)
        kind = getattr(torch, self.index.dtype)
        self._parts = [
            torch.from_file(str(folder / shard.name), shared=False, size=shard.tokens, dtype=kind)
            for shard in self.index.shards
        ]

    def __len__(self) -> int:
        return self.index.tokens

    def slice(self, start: int, length: int) -> torch.Tensor:
        """Return tokens [start, start + length) as int64, across shard boundaries; `~token` if it is not trained."""
        pieces = []
        for part in self._parts:
            if start < len(part) and length:
                piece = part[start : start + length]
                pieces.append(piece.to(torch.int64))
                length -= len(piece)
            start = max(0, start - len(part))
        found = torch.cat(pieces)
        if not self.index.is_masked:
            return found
        if self.index.dtype == "int32":  # the highest bit is the sign
            return torch.where(found < 0, ~(found & 0x7FFFFFFF), found)
        return torch.where(found > 0x7FFF, ~(found & 0x7FFF), found)


NOT_TRAINED = -100
"""Target of a token without loss, as in `torch.nn.functional.cross_entropy`."""


class MaskedTokens(NamedTuple):
    """Micro-batch of sequences that are trained in part."""

    inputs: torch.Tensor
    """Tokens [micro, seq_len], int64."""
    targets: torch.Tensor
    """Next tokens [micro, seq_len], or NOT_TRAINED."""
    trained: torch.Tensor
    """Number of trained targets in a micro-batch, as the mean over all micro-batches of the step on all ranks."""


_BLOCK = 1024
"""Positions of the global order in which each part of a mixture has its share, to a position or two."""


class Mixture:
    """Assignment of positions in the global order to parts, by weight. Any position is found without the others."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        bounds = list(accumulate(Fraction(str(weight)) for weight in weights))
        self._bounds, self._seed = [bound / bounds[-1] for bound in bounds], seed

    def place(self, position: int) -> tuple[int, int]:
        """Return the part at a position, and how many earlier positions the part has."""
        if len(self._bounds) == 1:
            return 0, position
        block, offset = divmod(position, _BLOCK)
        before, after = self._ends(block), self._ends(block + 1)
        slot, first = Permutation(_BLOCK, mix(self._seed) ^ block)[offset], 0
        for part in range(len(self._bounds)):
            start = before[part] - (before[part - 1] if part else 0)
            count = after[part] - (after[part - 1] if part else 0) - start
            if slot < first + count:
                return part, start + slot - first
            first += count
        raise AssertionError(f"slot {slot} of {first}")

    def _ends(self, block: int) -> list[int]:
        """Return how many positions of the first blocks the parts up to each one have."""
        return [int(bound * _BLOCK * block + Fraction(1, 2)) for bound in self._bounds]


class TokenData:
    """Sequences of `seq_len` + 1 tokens. Step s takes indices (s-1) x batch .. s x batch of the global order.

    Shards that are trained in part give MaskedTokens. Each part of a mixture has an order and epochs of its own.
    """

    def __init__(
        self, folder: Path, train: TrainConfig, *,
        shuffle: bool, dp_rank: int, dp_size: int, device: torch.device, held_out: int = 0,
    ) -> None:  # fmt: skip
        """Open the data. Its last `held_out` batches are used only for validation. Raises ValueError."""
        self._folder, self._index = folder, TokenIndex.read(folder)
        self._streams = [TokenStream(Path(part.path)) for part in self._index.parts] or [TokenStream(folder)]
        self._mixture = Mixture([part.weight for part in self._index.parts] or [1.0], train.seed)
        for problem in batch_problems(train, dp_size):
            raise ValueError(problem)
        self._seq_len, self._batch_size = train.seq_len, train.batch_size
        self._micro = train.micro_batch_size or train.batch_size // dp_size
        self._seed, self._shuffle = train.seed, shuffle
        self._dp_rank, self._dp_size, self._device = dp_rank, dp_size, device
        self._held_out = held_out
        self._held_parts = [self._mixture.place(position)[0] for position in range(held_out * train.batch_size)]
        held = Counter(self._held_parts)
        self._sequences = [(len(stream) - 1) // train.seq_len - held[part] for part, stream in enumerate(self._streams)]
        self.sequences = sum(self._sequences)
        """Number of training sequences."""
        self.consumed = 0
        self.fingerprint = self._index.fingerprint
        self.tokens_per_step = train.batch_size * train.seq_len
        for stream, count in zip(self._streams, self._sequences, strict=True):
            if count < 1:
                rest = f" and the {held_out} held-out batches (validation.batches)" if held_out else ""
                raise ValueError(
                    f"{stream.folder} holds {len(stream)} tokens, too few for one sequence of {self._seq_len} + 1{rest}"
                )

    def changed_shards(self, reader: int = 0, readers: int = 1) -> list[str]:
        """Return the files in this reader's share whose bytes differ from the index. Raises OSError."""
        return self._index.changed_shards(self._folder, reader, readers)

    def sequence(self, position: int) -> tuple[int, int]:
        """Return the part and the sequence's number in it at `position` in the endless global order.

        Each part has one permutation per epoch.
        """
        part, index = self._mixture.place(position)
        epoch, place = divmod(index, self._sequences[part])
        if not self._shuffle:
            return part, place
        seed = mix(mix(self._seed) ^ part) if part else mix(self._seed)
        return part, Permutation(self._sequences[part], seed ^ epoch)[place]

    def seek(self, consumed: int) -> None:
        self.consumed = consumed

    def take(self) -> Sequence[Any]:
        """Return micro-batches of shape [micro, seq_len + 1], int64, or MaskedTokens."""
        sequences = [self.sequence(self.consumed + place) for place in self._places()]
        self.consumed += self._batch_size
        return self._micro_batches(sequences)

    def held_out(self) -> Iterator[Sequence[Any]]:
        """Yield this rank's micro-batches from each held-out batch, always in the same order."""
        numbers = list(self._sequences)
        sequences = []
        for part in self._held_parts:
            sequences.append((part, numbers[part]))
            numbers[part] += 1
        for batch in range(self._held_out):
            yield self._micro_batches([sequences[batch * self._batch_size + place] for place in self._places()])

    def _places(self) -> range:
        """Return this rank's places in a batch, or all if the number of trained tokens must be known."""
        return range(self._batch_size) if self._index.is_masked else self._own_places()

    def _own_places(self) -> range:
        share = self._batch_size // self._dp_size
        return range(self._dp_rank * share, (self._dp_rank + 1) * share)

    def _micro_batches(self, sequences: Sequence[tuple[int, int]]) -> list[Any]:
        rows = torch.stack([self.row(*sequence) for sequence in sequences])
        if not self._index.is_masked:
            return list(rows.to(self._device, non_blocking=True).split(self._micro))
        trained = (rows[:, 1:] >= 0).sum() * self._micro / self._batch_size
        own = rows[self._own_places().start : self._own_places().stop].to(self._device, non_blocking=True)
        inputs, targets = torch.where(own < 0, ~own, own)[:, :-1], torch.where(own < 0, NOT_TRAINED, own)[:, 1:]
        count = trained.clamp(min=1e-9).to(self._device)
        parts = zip(inputs.split(self._micro), targets.split(self._micro), strict=True)
        return [MaskedTokens(*pair, count) for pair in parts]

    def row(self, part: int, number: int) -> torch.Tensor:
        """Return the tokens of a sequence [seq_len + 1]; `~token` if it is not trained."""
        return self._streams[part].slice(number * self._seq_len, self._seq_len + 1)


_MOST_DRAWS = 4
"""Maximum draws per step: a DataLoader draws one number, and another if it shuffles."""
REASON = (
    "the first take() after the restart opened a DataLoader, which drew from torch's global generator, as the loss "
    "does. Unless the uninterrupted run also opened one in this step, dropout and other random draws differ from that "
    "run: open the DataLoader in load_state_dict() or seek(), or give it its own generator"
)

Batches = TypeVar("Batches")


class LoaderDraws:
    """Monitor of torch's CPU generator during two steps. Data that draws in both is assumed to draw in every step."""

    def __init__(self, *, restored: int) -> None:
        """`restored` is the step of the checkpoint. With 0, nothing is monitored."""
        self.restored, self._left = restored, 2 if restored else 0
        self._taken: torch.Tensor | None = None
        self._is_shifted = False

    def take(self, take: Callable[[], Batches]) -> Batches:
        """Return the result of `take`, and check its draws in a monitored step."""
        if not self._left:
            return take()
        self._left -= 1
        before = torch.get_rng_state()
        batches = take()
        after = torch.get_rng_state()
        if self._left:
            self._taken = after if _is_drawn_by_loaders(before, after) else None
        else:
            self._is_shifted = self._is_shifted and torch.equal(before, after)
        return batches

    def reason(self) -> str:
        """Return why the random numbers may differ, or "" if they do not. Call this once after the step's passes."""
        if self._left:
            self._is_shifted = self._taken is not None and not torch.equal(self._taken, torch.get_rng_state())
            return ""
        found, self._is_shifted = REASON if self._is_shifted else "", False
        return found


def _is_drawn_by_loaders(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether the two states differ only by a few draws, such as those of `iter(DataLoader)`."""
    if torch.equal(before, after):
        return False
    generator = torch.Generator()
    generator.set_state(before)
    for _ in range(_MOST_DRAWS):
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        if torch.equal(generator.get_state(), after):
            return True
    return False
