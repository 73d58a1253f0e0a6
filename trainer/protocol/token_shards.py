"""Token shards: documents as memory-mapped little-endian files of numbers, with an index and a fingerprint.

A number is uint16, or int32 for a large vocabulary. If only parts of the documents are trained, the highest bit of the
other tokens is set. This module uses only the standard library, because the login node reads indexes too.
"""

import hashlib
from array import array
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, write_durably
from trainer.protocol.plain_data import build

SCHEMA = "orch.tokens/1"
INDEX_NAME = "index.json"
ARRAY_TYPES = {"uint16": "H", "int32": "i"}
"""Codes of the module `array` for the numbers of a shard."""
MASK_BITS = {"uint16": 1 << 15, "int32": 1 << 31}
_CHECKED_BYTES = 2 << 30  # a few seconds of reading


class TokensError(ValueError):
    """Unusable text, or a folder without usable tokens."""


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """File of tokens. `digest` is the BLAKE2b-256 digest of its bytes."""

    name: str
    tokens: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class MixedFolder:
    """Folder of shards in a mixture. `weight` is its share of the sequences, relative to the other folders."""

    path: str
    weight: float
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """Index of a shard folder, or of a mixture of them. `fingerprint` identifies the tokens and their order."""

    dtype: str
    tokens: int
    vocab_size: int
    shards: tuple[TokenShard, ...]
    fingerprint: str
    sources: int  # files read
    skipped: int  # binary, empty or unreadable files
    is_masked: bool = False
    """Whether the highest bit of a number says that its token is not trained."""
    tokenizer: str = ""
    """Folder or name of the tokenizer; empty: bytes."""
    tokenizer_digest: str = ""
    parts: tuple[MixedFolder, ...] = ()
    """Folders of a mixture, which has no shards of its own."""

    @property
    def itemsize(self) -> int:
        return array(ARRAY_TYPES[self.dtype]).itemsize

    @classmethod
    def read(cls, folder: Path) -> "TokenIndex":
        """Parse and check the index of `folder`. Raises TokensError with a remedy."""
        path = folder / INDEX_NAME
        hint = "create it with `orch data prepare PATHS --out DIR`"
        try:
            fields = read_json(path)
        except FileNotFoundError as error:
            raise TokensError(f"{folder} has no tokens ({INDEX_NAME} is missing): {hint}") from error
        except (OSError, ValueError) as error:
            raise TokensError(f"cannot read {path}: {error}") from error
        index = _parse(fields, path)
        for shard in index.shards:
            _check_size(folder / shard.name, shard.tokens, index.itemsize)
        for part in index.parts:
            if cls.read(Path(part.path)).fingerprint != part.fingerprint:
                raise TokensError(f"{part.path} has other tokens than when {folder} was mixed: mix it again")
        return index

    def changed_shards(self, folder: Path, reader: int = 0, readers: int = 1) -> list[str]:
        """Return the names of this reader's share of shards whose digest has changed. Raises OSError."""
        changed = []
        for part in self.parts:
            names = TokenIndex.read(Path(part.path)).changed_shards(Path(part.path), reader, readers)
            changed += [f"{part.path}/{name}" for name in names]
        for shard in self.shards[reader::readers]:
            with (folder / shard.name).open("rb") as stream:
                found = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
            if found != shard.digest:
                changed.append(shard.name)
        return changed

    def shards_changed_lately(self, folder: Path) -> list[str]:
        """Return the changed shards among those written after the index, checking up to 2 GiB. Raises OSError.

        The index is written last, and programs cannot set back an inode's change time (ctime). Shards with the same
        ctime as the index are checked too, because ctime advances in ticks of the kernel's clock.
        """
        if self.parts:
            changed = [
                (one.path, TokenIndex.read(Path(one.path)).shards_changed_lately(Path(one.path))) for one in self.parts
            ]
            return [f"{path}/{name}" for path, names in changed for name in names]
        written = (folder / INDEX_NAME).stat().st_ctime_ns
        later, left = [], _CHECKED_BYTES
        for shard in self.shards:
            if (folder / shard.name).stat().st_ctime_ns >= written and left > 0:
                later.append(shard)
                left -= self.itemsize * shard.tokens
        return replace(self, shards=tuple(later)).changed_shards(folder)

    def write(self, folder: Path) -> None:
        write_durably(folder / INDEX_NAME, dump_line({"schema": SCHEMA, **asdict(self)}).encode(), mode=0o644)


def _parse(fields: Any, path: Path) -> TokenIndex:
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise TokensError(f"{path} is not an index of tokens ({SCHEMA})")
    try:
        index = build(TokenIndex, fields)
        if index.dtype not in ARRAY_TYPES and not index.parts:
            raise ValueError(f"dtype={index.dtype}: must be one of {', '.join(ARRAY_TYPES)}")
        return index
    except (ValueError, TypeError) as error:
        raise TokensError(f"{path} is damaged ({error}): remove the folder and prepare it again") from error


def _check_size(path: Path, tokens: int, itemsize: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TokensError(f"token shard {path} cannot be read: {error.strerror}") from error
    if size != itemsize * tokens:
        raise TokensError(
            f"token shard {path} has {size} bytes instead of {itemsize * tokens}: prepare the folder again"
        )
