"""Token shards: text converted to memory-mapped little-endian uint16 files with an index and a fingerprint.

Tokens 0..255 are the bytes of a document, and 256 ends it. This module uses only the standard library, because the
login node prepares data too.
"""

import hashlib
import os
import secrets
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from checkpointing.storage.durable import canonical, dump_line, fsync_dir, read_json, write_durably
from trainer.protocol.plain_data import build

SCHEMA = "orch.tokens/1"
INDEX_NAME = "index.json"
SEPARATOR = 256
VOCAB_SIZE = 257
STDLIB = "python-stdlib"
SHARD_TOKENS = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_CHECKED_BYTES = 2 << 30  # a few seconds of reading
_SEPARATOR_BYTES = SEPARATOR.to_bytes(2, "little")
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

Progress = Callable[[int, int], None]
"""Callback that receives the number of bytes done and the total."""


class TokensError(ValueError):
    """Unusable text, or a folder without usable tokens."""


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """File of tokens. `digest` is the BLAKE2b-256 digest of its bytes."""

    name: str
    tokens: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """Index of a shard folder. `fingerprint` identifies the tokens and their order."""

    dtype: str
    tokens: int
    vocab_size: int
    shards: tuple[TokenShard, ...]
    fingerprint: str
    sources: int  # files read
    skipped: int  # binary or unreadable files

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
            _check_size(folder / shard.name, shard.tokens)
        return index

    def changed_shards(self, folder: Path, reader: int = 0, readers: int = 1) -> list[str]:
        """Return the names of this reader's share of shards whose digest has changed. Raises OSError."""
        changed = []
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
        written = (folder / INDEX_NAME).stat().st_ctime_ns
        later, left = [], _CHECKED_BYTES
        for shard in self.shards:
            if (folder / shard.name).stat().st_ctime_ns >= written and left > 0:
                later.append(shard)
                left -= 2 * shard.tokens
        return replace(self, shards=tuple(later)).changed_shards(folder)

    def write(self, folder: Path) -> None:
        write_durably(folder / INDEX_NAME, dump_line({"schema": SCHEMA, **asdict(self)}).encode(), mode=0o644)


def _parse(fields: Any, path: Path) -> TokenIndex:
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise TokensError(f"{path} is not an index of tokens ({SCHEMA})")
    try:
        return build(TokenIndex, fields)
    except (ValueError, TypeError) as error:
        raise TokensError(f"{path} is damaged ({error}): remove the folder and prepare it again") from error


def _check_size(path: Path, tokens: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TokensError(f"token shard {path} cannot be read: {error.strerror}") from error
    if size != 2 * tokens:
        raise TokensError(f"token shard {path} has {size} bytes instead of {2 * tokens}: prepare the folder again")


def expand_sources(sources: Sequence[str | Path]) -> list[Path]:
    """Return the source files in a fixed order. Raises TokensError for a missing path.

    A folder stands for every file below it except hidden files. `python-stdlib` stands for the Python source of the
    standard library without its tests.
    """
    found: list[Path] = []
    for source in sources:
        if str(source) == STDLIB:
            found += _below(Path(sysconfig.get_path("stdlib")), suffix=".py", left_out=_STDLIB_LEFT_OUT)
            continue
        path = Path(source).expanduser()
        if path.is_dir():
            found += _below(path)
        elif path.exists():
            found.append(path)
        else:
            raise TokensError(f"{path} does not exist: give text files, folders, or `{STDLIB}`")
    return found


def _below(folder: Path, *, suffix: str = "", left_out: frozenset[str] = frozenset()) -> list[Path]:
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        found += [Path(place) / name for name in sorted(names) if name.endswith(suffix) and not name.startswith(".")]
    return found


def prepare(sources: Sequence[str | Path], out: Path, progress: Progress | None = None) -> TokenIndex:
    """Tokenize `sources` into the folder `out`. Keep `out` if it already holds the same tokens.

    Raises TokensError if there is nothing to read or `out` contains something else, OSError if it cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_folder(out.parent) as temporary:
        return _place(_write(sources, temporary, progress), temporary, out)


def prepare_under(
    sources: Sequence[str | Path], folder: Path, progress: Progress | None = None
) -> tuple[Path, TokenIndex]:
    """Tokenize `sources` into `folder/<fingerprint>`, one folder for each text. Raises the same errors as `prepare`."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _temporary_folder(folder) as temporary:
        index = _write(sources, temporary, progress)
        out = folder / index.fingerprint[:16]
        return out, _place(index, temporary, out)


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    temporary = parent / f".{secrets.token_hex(6)}.tmp"
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _place(index: TokenIndex, temporary: Path, out: Path) -> TokenIndex:
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    try:
        os.rename(temporary, out)
    except OSError:
        if not out.exists():
            raise
        return _existing(index, out)
    fsync_dir(out.parent)
    return index


def _existing(index: TokenIndex, out: Path) -> TokenIndex:
    """Return the index of `out` if it holds the tokens of `index`, possibly written concurrently by another process."""
    found = TokenIndex.read(out) if (out / INDEX_NAME).exists() else None
    if found is None or found.fingerprint != index.fingerprint:
        raise TokensError(f"{out} exists and contains something else: choose another folder or remove it")
    if changed := found.changed_shards(out):
        raise TokensError(f"{out / changed[0]} has changed since it was written: remove {out} to have it rebuilt")
    return found


def _write(sources: Sequence[str | Path], folder: Path, progress: Progress | None) -> TokenIndex:
    files = expand_sources(sources)
    total = sum(_size(path) for path in files)
    folder.mkdir(mode=0o755)  # with a umask of 0002 the group could otherwise change the training data
    writer = _ShardWriter(folder)
    done = read = 0
    for path in files:
        for chunk in _text(path):
            writer.add(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
        read += writer.end_document()
    index = writer.finish(sources=read, skipped=len(files) - read)
    if not read:
        given = ", ".join(str(source) for source in sources) or "an empty list of paths"
        raise TokensError(f"nothing to read in {given}: {len(files)} files, none of them text with content")
    index.write(folder)
    fsync_dir(folder)
    return index


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path) -> Iterator[bytes]:
    """Yield the file's bytes, or nothing if it is unreadable or binary (a NUL in its first megabyte)."""
    try:
        if not path.is_file():  # a FIFO would block forever
            return
        with path.open("rb") as stream:
            chunk = stream.read(_CHUNK)
            if b"\0" in chunk:
                return
            while chunk:
                yield chunk
                chunk = stream.read(_CHUNK)
    except PermissionError:
        return


class _ShardWriter:
    """Writer that appends documents to shards of at most SHARD_TOKENS tokens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: list[TokenShard] = []
        self._stream: BinaryIO | None = None
        self._name = ""
        self._tokens = 0
        self._document = 0
        self._digest = hashlib.blake2b(digest_size=32)

    def add(self, text: bytes) -> None:
        widened = bytearray(2 * len(text))
        widened[::2] = text
        self._document += len(text)
        self._append(widened)

    def end_document(self) -> int:
        """Close the current document and return 1 if it had content, else 0."""
        if not self._document:
            return 0
        self._document = 0
        self._append(_SEPARATOR_BYTES)
        return 1

    def _append(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            if self._stream is None:
                self._name = f"shard-{len(self._shards):05d}.bin"
                self._stream = (self._folder / self._name).open("wb")
            part = view[: 2 * (SHARD_TOKENS - self._tokens)]
            self._stream.write(part)
            self._digest.update(part)
            self._tokens += len(part) // 2
            view = view[len(part) :]
            if self._tokens == SHARD_TOKENS:
                self._close()

    def _close(self) -> None:
        if self._stream is None:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._shards.append(TokenShard(name=self._name, tokens=self._tokens, digest=self._digest.hexdigest()))
        self._stream, self._tokens, self._digest = None, 0, hashlib.blake2b(digest_size=32)

    def finish(self, *, sources: int, skipped: int) -> TokenIndex:
        self._close()
        content = [[shard.tokens, shard.digest] for shard in self._shards]
        return TokenIndex(
            dtype="uint16",
            tokens=sum(shard.tokens for shard in self._shards),
            vocab_size=VOCAB_SIZE,
            shards=tuple(self._shards),
            fingerprint=hashlib.blake2b(canonical([SCHEMA, content]), digest_size=32).hexdigest(),
            sources=sources,
            skipped=skipped,
        )
