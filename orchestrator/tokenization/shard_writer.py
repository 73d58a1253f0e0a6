"""Conversion of documents to token shards, written to a temporary folder that then gets its name."""

import hashlib
import os
import secrets
import shutil
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from checkpointing.storage.durable import canonical, fsync_dir
from orchestrator.tokenization.documents import Document, SourceFile, expand_sources
from orchestrator.tokenization.tokenizers import SEPARATOR, ByteTokenizer, Tokenizer
from trainer.protocol.token_shards import (
    ARRAY_TYPES,
    INDEX_NAME,
    MASK_BITS,
    SCHEMA,
    MixedFolder,
    TokenIndex,
    TokensError,
    TokenShard,
)

SHARD_TOKENS = 64 * 1024 * 1024
_TOGETHER, _TEXT_TOGETHER = 1000, 4 << 20
"""Most documents, and characters, that are tokenized together."""
TEXT_FIELD = "text"
"""Field of a row that has its text, unless another is named."""
Progress = Callable[[int, int], None]
"""Callback that receives the number of bytes done and the total."""


def prepare(
    sources: Sequence[str | Path], out: Path, progress: Progress | None = None, *,
    tokenizer: Tokenizer | None = None, field: str = TEXT_FIELD,
) -> TokenIndex:  # fmt: skip
    """Tokenize `sources` into the folder `out`, by default as bytes. Keep `out` if it already holds the same tokens.

    Raises TokensError if there is nothing to read or `out` contains something else, OSError if it cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_folder(out.parent) as temporary:
        return _place(_write(sources, temporary, progress, tokenizer or ByteTokenizer(), field), temporary, out)


def prepare_under(
    sources: Sequence[str | Path], folder: Path, progress: Progress | None = None, *,
    tokenizer: Tokenizer | None = None, field: str = TEXT_FIELD,
) -> tuple[Path, TokenIndex]:  # fmt: skip
    """Tokenize `sources` into `folder/<fingerprint>`, one folder for each text. Raises the same errors as `prepare`."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _temporary_folder(folder) as temporary:
        index = _write(sources, temporary, progress, tokenizer or ByteTokenizer(), field)
        out = folder / index.fingerprint[:16]
        return out, _place(index, temporary, out)


def mix_folders(weights: Sequence[tuple[Path, float]], out: Path) -> TokenIndex:
    """Write a mixture of token folders, which refers to them. Keep `out` if it already is the same mixture.

    `weights` are the folders' shares of the sequences, relative to each other. Raises TokensError and OSError.
    """
    folders = {folder.resolve(): TokenIndex.read(folder) for folder, _ in weights}
    if len(folders) < len(weights):
        raise TokensError("a folder is named twice: give it the sum of its weights")
    if len({index.tokenizer_digest for index in folders.values()}) > 1:
        told = ", ".join(f"{folder} {index.tokenizer or 'bytes'}" for folder, index in folders.items())
        raise TokensError(f"the folders have different tokenizers: {told}")
    first = next(iter(folders.values()))
    if nested := [str(folder) for folder, index in folders.items() if index.parts]:
        raise TokensError(f"{nested[0]} is a mixture itself: name its folders")
    parts = tuple(
        MixedFolder(path=str(folder), weight=weight, fingerprint=index.fingerprint)
        for (folder, index), (_, weight) in zip(folders.items(), weights, strict=True)
    )
    content = [[part.fingerprint, part.weight] for part in parts]
    index = TokenIndex(
        dtype="", tokens=sum(one.tokens for one in folders.values()), shards=(), parts=parts,
        vocab_size=max(one.vocab_size for one in folders.values()),
        fingerprint=hashlib.blake2b(canonical([SCHEMA, "mixture", content]), digest_size=32).hexdigest(),
        sources=sum(one.sources for one in folders.values()), skipped=sum(one.skipped for one in folders.values()),
        is_masked=any(one.is_masked for one in folders.values()), tokenizer=first.tokenizer,
        tokenizer_digest=first.tokenizer_digest,
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_folder(out.parent) as temporary:
        temporary.mkdir(mode=0o755)
        index.write(temporary)
        return _place(index, temporary, out)


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


def _write(
    sources: Sequence[str | Path], folder: Path, progress: Progress | None, tokenizer: Tokenizer, field: str
) -> TokenIndex:
    files = expand_sources(sources)
    folder.mkdir(mode=0o755)  # with a umask of 0002 the group could otherwise change the training data
    is_masked = any(one.has_mask for file in files if not file.is_text for one in _first(file.documents(field)))
    large = tokenizer.vocab_size > (MASK_BITS["uint16"] if is_masked else 2 * MASK_BITS["uint16"])
    writer = _ShardWriter(folder, "int32" if large else "uint16", is_masked=is_masked)
    with closing(writer):
        read = _add_files(writer, files, tokenizer, field, progress)
    if not read:
        given = ", ".join(str(source) for source in sources) or "an empty list of paths"
        raise TokensError(f"nothing to read in {given}: {len(files)} files, none of them text with content")
    index = writer.finish(tokenizer, sources=read, skipped=len(files) - read)
    index.write(folder)
    fsync_dir(folder)
    return index


def _add_files(
    writer: "_ShardWriter", files: Sequence[SourceFile], tokenizer: Tokenizer, field: str, progress: Progress | None
) -> int:
    """Write the documents of all files; return the number of files that have some."""
    total, before, read = sum(file.size for file in files), 0, 0

    def report(place: int, size: int) -> None:
        if progress is not None:
            progress(before + min(place, size), total)

    for file in files:
        used = place = 0
        if isinstance(tokenizer, ByteTokenizer) and file.is_text:  # of any size, in little memory
            for chunk in file.text():
                used = place = writer.add_bytes(chunk) + place
                report(place, file.size)
            writer.end_bytes(used)
        else:
            for some in _groups(file.documents(field)):
                used += _add_documents(writer, tokenizer, some, file)
                place += sum(one.size for one in some)
                report(place, file.size)
        read += used > 0
        before += file.size
        if place < file.size:
            report(0, 0)
    return read


def _first(documents: Iterable[Document]) -> Iterator[Document]:
    for one in documents:
        yield one
        return


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents in groups that are tokenized together."""
    group, size = list[Document](), 0
    for one in documents:
        group.append(one)
        size += one.size
        if len(group) == _TOGETHER or size >= _TEXT_TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


def _add_documents(
    writer: "_ShardWriter", tokenizer: Tokenizer, documents: Sequence[Document], file: SourceFile
) -> int:
    """Write the documents that have content; return how many. Raises TokensError."""
    used = 0
    try:
        for tokens, trained in tokenizer.encode(documents):
            if len(tokens) > 1:  # more than its end
                writer.add_tokens(tokens, trained)
                used += 1
    except TokensError as error:
        raise TokensError(f"{file.name}: {error}") from error
    return used


class _ShardWriter:
    """Writer that appends documents to shards of at most SHARD_TOKENS tokens."""

    def __init__(self, folder: Path, dtype: str, *, is_masked: bool) -> None:
        self._folder, self._dtype, self._is_masked = folder, dtype, is_masked
        self._itemsize = array(ARRAY_TYPES[dtype]).itemsize
        self._shards: list[TokenShard] = []
        self._stream: BinaryIO | None = None
        self._name = ""
        self._tokens = 0
        self._digest = hashlib.blake2b(digest_size=32)

    def add_bytes(self, text: bytes) -> int:
        """Write a part of a document whose bytes are its tokens; return its length."""
        widened = bytearray(self._itemsize * len(text))
        widened[:: self._itemsize] = text
        self._append(widened)
        return len(text)

    def end_bytes(self, length: int) -> None:
        """End such a document, unless it is empty."""
        if length:
            self._append(SEPARATOR.to_bytes(self._itemsize, "little"))

    def add_tokens(self, tokens: Sequence[int], trained: Sequence[bool] | None) -> None:
        """Write a document. Raises TokensError for one that is trained in part, if the first one of its file is not."""
        if trained is not None and not self._is_masked:
            raise TokensError("has documents with and without an untrained part: separate them into files")
        bit = MASK_BITS[self._dtype]
        largest = bit if self._is_masked or self._dtype == "int32" else 2 * bit
        if max(tokens) >= largest:
            raise TokensError(f"token {max(tokens)} is outside the tokenizer's vocabulary")
        numbers = (
            tokens
            if trained is None
            else [one if is_trained else one | bit for one, is_trained in zip(tokens, trained, strict=True)]
        )
        packed = array("I" if self._dtype == "int32" else "H", numbers)
        if sys.byteorder == "big":
            packed.byteswap()
        self._append(packed.tobytes())

    def _append(self, data: bytes | bytearray) -> None:
        view, item = memoryview(data), self._itemsize
        while view:
            if self._stream is None:
                self._name = f"shard-{len(self._shards):05d}.bin"
                self._stream = (self._folder / self._name).open("wb")
            part = view[: item * (SHARD_TOKENS - self._tokens)]
            self._stream.write(part)
            self._digest.update(part)
            self._tokens += len(part) // item
            view = view[len(part) :]
            if self._tokens == SHARD_TOKENS:
                self.close()

    def close(self) -> None:
        """Complete the open shard, if any."""
        if self._stream is None:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._shards.append(TokenShard(name=self._name, tokens=self._tokens, digest=self._digest.hexdigest()))
        self._stream, self._tokens, self._digest = None, 0, hashlib.blake2b(digest_size=32)

    def finish(self, tokenizer: Tokenizer, *, sources: int, skipped: int) -> TokenIndex:
        content: list[Any] = [[shard.tokens, shard.digest] for shard in self._shards]
        if self._is_masked or self._dtype != "uint16":  # the same numbers would be other tokens
            content.append([self._dtype, self._is_masked])
        return TokenIndex(
            dtype=self._dtype,
            tokens=sum(shard.tokens for shard in self._shards),
            vocab_size=tokenizer.vocab_size,
            shards=tuple(self._shards),
            fingerprint=hashlib.blake2b(canonical([SCHEMA, content]), digest_size=32).hexdigest(),
            sources=sources,
            skipped=skipped,
            is_masked=self._is_masked,
            tokenizer=tokenizer.name,
            tokenizer_digest=tokenizer.digest,
        )
