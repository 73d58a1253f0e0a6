"""Documents of text files, JSON lines, Parquet and Arrow files, on disks or at any URL that fsspec knows."""

import gzip
import importlib
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from checkpointing.storage.durable import read_json
from trainer.protocol.token_shards import TokensError

STDLIB = "python-stdlib"
CHUNK = 1024 * 1024
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_LINES, _ROWS, _JSON = (".jsonl", ".ndjson"), (".parquet", ".arrow"), ".json"
_DATASET, _SPLITS = "state.json", "dataset_dict.json"
"""Files of a Hugging Face dataset on disk, and of one with several splits."""
_ARRAY = re.compile(rb"\s*\[\s*\{")
"""Beginning of a JSON array of objects."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """Text, or the messages of a chat."""

    text: str = ""
    untrained: int | None = None
    """Number of characters at the beginning without loss; None: not a prompt with its completion."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Any, ...] = ()
    """Tools that a chat's template describes."""

    @property
    def size(self) -> int:
        """Number of characters."""
        return len(self.text) + sum(len(str(message.get("content") or "")) for message in self.messages or ())

    @property
    def has_mask(self) -> bool:
        """Whether documents of this kind are trained in part."""
        return self.untrained is not None or self.messages is not None


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """File of documents."""

    name: str
    size: int
    open: Callable[[], BinaryIO]

    @property
    def is_text(self) -> bool:
        """Whether the whole file is one document."""
        return not _plain_name(self.name).endswith((*_LINES, *_ROWS, _JSON))

    def documents(self, field: str) -> Iterator[Document]:
        """Yield the documents. `field` has the text of a row without messages. Raises TokensError."""
        if self.is_text:
            text = b"".join(self.text()).decode("utf-8", "replace")
            yield from [Document(text=text)] if text else []
            return
        try:
            for number, row in enumerate(self._rows(), 1):
                yield row if isinstance(row, Document) else _document(row, field, f"{self.name}, row {number}")
        except (EOFError, OSError, zlib.error) as error:
            raise TokensError(f"{self.name}: cannot be read to its end: {error}") from error

    def text(self) -> Iterator[bytes]:
        """Yield the file's bytes, or nothing if it is unreadable or binary (a NUL in its first megabyte)."""
        try:
            with self.open() as stream:
                chunk = stream.read(CHUNK)
                if b"\0" in chunk:
                    return
                while chunk:
                    yield chunk
                    chunk = stream.read(CHUNK)
        except PermissionError:
            return

    def _rows(self) -> Iterator[Any]:
        plain = _plain_name(self.name)
        with self.open() as raw:
            if plain.endswith(_JSON):
                yield from _json_rows(raw.read(), self.name)
            elif plain.endswith(_LINES):
                lines = gzip.GzipFile(fileobj=raw) if self.name.lower().endswith(".gz") else raw
                yield from (_parse(line, self.name) for line in lines if line.strip())
            elif plain.endswith(".parquet"):
                yield from _arrow_rows(lambda: _pyarrow("parquet").ParquetFile(raw).iter_batches(), self.name)
            else:
                yield from _arrow_rows(lambda: _open_arrow(raw), self.name)


def _plain_name(name: str) -> str:
    return name.lower().removesuffix(".gz")


def _json_rows(data: bytes, name: str) -> Iterator[Any]:
    """Yield the rows of an array of objects, or any other file as one text."""
    if _ARRAY.match(data):
        yield from _parse(data, name)
    elif data and b"\0" not in data:
        yield Document(text=data.decode("utf-8", "replace"))


def _parse(line: bytes, name: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TokensError(f"{name}: is not JSON: {error}: {line[:60]!r}") from error


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise TokensError(f"Parquet and Arrow files need pyarrow: pip install pyarrow ({error})") from error


def _arrow_rows(read: Callable[[], Iterable[Any]], name: str) -> Iterator[Any]:
    arrow_error = _pyarrow("lib").ArrowException
    try:
        for batch in read():
            yield from batch.to_pylist()
    except arrow_error as error:
        raise TokensError(f"{name}: cannot be read: {error}") from error


def _open_arrow(raw: BinaryIO) -> Iterable[Any]:
    """Return the batches of a stream, as datasets write it, or of a file (Feather)."""
    ipc, magic = _pyarrow("ipc"), raw.read(6)
    raw.seek(0)
    if magic != b"ARROW1":
        stream: Iterable[Any] = ipc.open_stream(raw)
        return stream
    file = ipc.open_file(raw)
    return (file.get_batch(number) for number in range(file.num_record_batches))


def _document(row: Any, field: str, where: str) -> Document:
    if not isinstance(row, Mapping):
        raise TokensError(f"{where}: must be an object, is a {type(row).__name__}")
    if field in row and isinstance(text := row[field] or "", str):
        return Document(text=_without_surrogates(text))
    if "messages" in row:
        tools = row.get("tools")
        tools = _parse(tools.encode(), where) if isinstance(tools, str) else tools
        return Document(messages=_check_messages(row["messages"] or (), where), tools=tuple(tools or ()))
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        prompt, completion = _without_surrogates(prompt), _without_surrogates(completion)
        return Document(text=prompt + completion, untrained=len(prompt))
    if "prompt" in row and "completion" in row:
        raise TokensError(f"{where}: prompt and completion must be text; give chats as messages")
    known = ", ".join(sorted(map(str, row)))
    raise TokensError(
        f"{where}: has neither {field}, messages, nor prompt and completion, only {known}: name the text with --field"
    )


def _without_surrogates(text: str) -> str:
    """Return a text of JSON with U+FFFD for halves of characters, which no tokenizer accepts."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _check_messages(messages: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return a chat's messages, whose contents are text. Raises TokensError."""
    for number, message in enumerate(messages if isinstance(messages, list | tuple) else [messages], 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokensError(f"{where}: message {number} must be an object with role and content, is {message!r:.60}")
        if not isinstance(message.get("content"), str | None):
            raise TokensError(f"{where}: the content of message {number} must be text, is {message['content']!r:.60}")
    return tuple(
        {name: _without_surrogates(value) if isinstance(value, str) else value for name, value in message.items()}
        for message in messages
    )


def expand_sources(sources: Sequence[str | Path]) -> list[SourceFile]:
    """Return the source files in a fixed order. Raises TokensError for a missing path.

    A folder stands for every file below it except hidden files, a Hugging Face dataset on disk for its rows.
    `python-stdlib` stands for the Python source of the standard library without its tests.
    """
    found: list[SourceFile] = []
    for source in sources:
        if "://" in str(source):
            found += _files_at_url(str(source))
            continue
        if str(source) == STDLIB:
            folder = Path(sysconfig.get_path("stdlib"))
            found += map(_local, _below(folder, suffix=".py", left_out=_STDLIB_LEFT_OUT))
            continue
        path = Path(source).expanduser()
        if (path / _SPLITS).is_file():
            splits = ", ".join(read_json(path / _SPLITS).get("splits", ()))
            raise TokensError(f"{path} has several splits ({splits}): name one, such as {path}/train")
        if (path / _DATASET).is_file():
            files = read_json(path / _DATASET).get("_data_files", ())
            found += [_local(path / str(file["filename"])) for file in files]
        elif path.is_dir():
            found += map(_local, _below(path))
        elif path.exists():
            found.append(_local(path))
        else:
            raise TokensError(f"{path} does not exist: give files, folders, URLs, or `{STDLIB}`")
    return found


def _local(path: Path) -> SourceFile:
    def open_file() -> BinaryIO:
        if not path.is_file():  # a FIFO would block forever
            raise PermissionError(path)
        return path.open("rb")

    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    return SourceFile(name=str(path), size=size, open=open_file)


def _below(folder: Path, *, suffix: str = "", left_out: frozenset[str] = frozenset()) -> list[Path]:
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        found += [Path(place) / name for name in sorted(names) if name.endswith(suffix) and not name.startswith(".")]
    return found


def _files_at_url(url: str) -> list[SourceFile]:
    import fsspec  # half a second, for those who have URLs

    try:
        system, path = fsspec.core.url_to_fs(url)
        entries = system.find(path, detail=True) if system.isdir(path) else {path: system.info(path)}
        if f"{path}/{_SPLITS}" in entries:
            raise TokensError(f"{url} has several splits: name one, such as {url}/train")
        if f"{path}/{_DATASET}" in entries:
            files = json.loads(system.cat_file(f"{path}/{_DATASET}")).get("_data_files", ())
            entries = {name: entries[name] for file in files if (name := f"{path}/{file['filename']}") in entries}
    except TokensError:
        raise
    except (OSError, ValueError, ImportError, *_access_errors()) as error:  # type: ignore[misc]
        raise TokensError(f"{url} cannot be read: {error}") from error
    return [
        SourceFile(
            name=f"{url.partition('://')[0]}://{name}", size=int(entry.get("size") or 0), open=_opener(system, name)
        )
        for name, entry in sorted(entries.items())
    ]


def _access_errors() -> tuple[type[Exception], ...]:
    """Return the errors of missing or wrong credentials that are no OSError."""
    try:
        found: type[Exception] = importlib.import_module("botocore.exceptions").BotoCoreError
    except ImportError:
        return ()
    return (found,)


def _opener(system: Any, name: str) -> Callable[[], BinaryIO]:
    return lambda: system.open(name, "rb")
