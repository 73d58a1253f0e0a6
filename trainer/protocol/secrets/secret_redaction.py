"""Redaction of a run's secrets in the output of its processes. Every value becomes its name, as `***HF_TOKEN***`.

A process takes the values to redact from its environment. LISTED names the variables that contain secrets.
"""

import base64
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, quote_plus

LISTED = "ORCH_SECRETS"
"""Environment variable with the comma-separated names of the variables that contain secrets."""
LEAST = 6
"""Minimum size in bytes of a redacted value. Shorter values would match parts of unrelated numbers."""
_LEAST_ENCODED = 8
"""Minimum length of a base64 piece that identifies a value."""
_COMMON = re.compile(r"[-+0-9.eE_]{1,16}|[a-z_]{1,24}|/[\w./-]*")
"""Numbers, plain words and paths, which orch's records may contain legitimately."""


class Redactor:
    """Redactor for the values of variables, in every form that programs print."""

    def __init__(self, values: Mapping[str, str]) -> None:
        found: dict[str, str] = {}
        common: set[str] = set()
        for name, value in values.items():
            if len(_bytes(value)) >= LEAST:
                forms = dict.fromkeys(_forms(value), f"***{name}***")
                found |= forms
                common |= set(forms) if _COMMON.fullmatch(value) else set()
        # A value that contains another value is replaced first.
        self._texts = sorted(found.items(), key=lambda item: (-len(item[0]), item[0]))
        self._unique = [item for item in self._texts if item[0] not in common]
        self._data = sorted(
            ((_bytes(form), _bytes(shown)) for form, shown in found.items()), key=lambda item: -len(item[0])
        )
        self._first = {form[:1] for form, _ in self._data}

    def __bool__(self) -> bool:
        """Return whether there are values to redact."""
        return bool(self._data)

    def found(self, value: object) -> bool:
        """Return whether `record` would change this text or a text in this plain data."""
        if isinstance(value, (list, tuple, dict)):
            return any(self.found(item) for item in (value.values() if isinstance(value, dict) else value))
        return isinstance(value, str) and any(form in value for form, _ in self._unique)

    def data(self, data: bytes) -> bytes:
        """Redact bytes from a log or from evidence."""
        for form, shown in self._data:
            if form in data:
                data = data.replace(form, shown)
        return data

    def text(self, text: str) -> str:
        """Redact a text for users."""
        return _replace_forms(text, self._texts)

    def record(self, text: str) -> str:
        """Redact a JSON record, except numbers, plain words and paths, so that it remains valid."""
        return _replace_forms(text, self._unique)

    def beginning_at_end(self, data: bytes) -> int:
        """Return the index in `data` at which an incomplete value may start, or the length of `data`."""
        longest = len(self._data[0][0]) if self._data else 1
        for at in range(max(0, len(data) - longest + 1), len(data)):
            if data[at : at + 1] in self._first and any(form.startswith(data[at:]) for form, _ in self._data):
                return at
        return len(data)


class RedactedStream:
    """Redactor of a log's bytes, including values split across chunks."""

    def __init__(self) -> None:
        self.held = b""
        """Held-back end of the input, which may be the start of a value."""

    def redact(self, data: bytes) -> bytes:
        """Return the redacted bytes that can be written so far."""
        redactor = in_use()
        if not redactor:
            return data
        data = redactor.data(self.held + data)
        end = redactor.beginning_at_end(data)
        self.held = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """Return the held-back bytes when the input pauses."""
        data, self.held = self.held, b""
        return data


def in_use(environ: Mapping[str, str] = os.environ) -> Redactor:
    """Return the redactor of this process. It is cached, in case a program deletes its variables."""
    names = environ.get(LISTED)
    return _cached_redactor(names) if names else NOTHING


@functools.cache
def _cached_redactor(names: str) -> Redactor:
    return Redactor({name: os.environ[name] for name in names.split(",") if name in os.environ})


NOTHING = Redactor({})
"""Redactor of a process without secrets."""


def _replace_forms(text: str, forms: Iterable[tuple[str, str]]) -> str:
    for form, shown in forms:
        if form in text:
            text = text.replace(form, shown)
    return text


def _forms(value: str) -> Iterator[str]:
    """Yield the forms of a value: plain, in JSON, Python's repr, URLs and base64."""
    in_urls = {quote(value, safe=safe, errors="surrogateescape") for safe in ("", "/")}
    plus = quote_plus(value, errors="surrogateescape")
    for text in {value, repr(value)[1:-1], plus, *in_urls}:
        yield text
        for once in _in_json(text):
            yield once
            yield from _in_json(once)
    yield from _in_base64(_bytes(value))


def _in_json(text: str) -> set[str]:
    return {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}


def _in_base64(value: bytes) -> Iterator[str]:
    """Yield the base64 pieces of a value at any offset in the encoded data, for example after `user:`."""
    for before in range(3):
        data = bytes(before) + value
        # The first and last letters also encode adjacent bytes.
        first, end = (0, 2, 3)[before], len(data) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            piece = encode(data)[first:end].decode()
            if len(piece) >= _LEAST_ENCODED:
                yield piece


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
