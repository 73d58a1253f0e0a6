"""Values of secrets in what processes write: replaced by their names in every form, in whatever pieces they come."""

import base64
import json
from collections.abc import Callable, Iterator
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.protocol.secrets import secret_redaction
from trainer.protocol.secrets.secret_redaction import LISTED, RedactedStream, Redactor, in_use

VALUE = 'ca"nary/ü+\\8 1'
SHOWN = "***API_KEY***"


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process with secrets in its environment."""
    monkeypatch.setenv("API_KEY", "canary-12345")
    monkeypatch.setenv("LONGER", "canary-12345-67890")
    monkeypatch.setenv(LISTED, "API_KEY,LONGER")
    secret_redaction._cached_redactor.cache_clear()
    yield
    secret_redaction._cached_redactor.cache_clear()


def _in_base64(prefix: str) -> Callable[[str], str]:
    return lambda value: base64.b64encode(f"{prefix}{value}{prefix}".encode()).decode()


@pytest.mark.parametrize(
    "form",
    [
        str, repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: json.dumps(f"KeyError({value!r})"), lambda value: json.dumps(json.dumps({"a": value})), quote,
        quote_plus, lambda value: quote(value, safe=""), _in_base64(""), _in_base64("a"), _in_base64("us:"),
        lambda value: base64.urlsafe_b64encode(value.encode()).decode(),
    ],
)  # fmt: skip
def test_a_value_is_found_in_every_form(form: Callable[[str], str]) -> None:
    redactor = Redactor({"API_KEY": VALUE})
    text = f"before {form(VALUE)} after"
    shown = redactor.text(text)
    assert SHOWN in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert redactor.data(text.encode()).decode() == shown
    assert redactor.record(text) == shown
    assert redactor.found({"a": [text]})


def test_what_is_no_secret_stays() -> None:
    text = "step 12345 of 20000 \udcff \ud800"
    assert Redactor({}).text(text) == text
    assert not Redactor({"PIN": "12345"}), "too short"
    assert Redactor({"API_KEY": "canary-1"}).text(text) == text


def test_records_keep_their_numbers_words_and_paths() -> None:
    redactor = Redactor({"SIZE": "1048576", "MODE": "finished", "HF_HOME": "/scratch/ann/hf", "KEY": "canary-1"})
    line = json.dumps({"result": "finished", "bytes": 1048576, "path": "/scratch/ann/hf/a", "reason": "canary-1"})
    assert json.loads(redactor.record(line)) == {**json.loads(line), "reason": "***KEY***"}
    assert redactor.text(line).count("***") == 8, "what people read says none of it"


def test_a_process_knows_from_its_environment_what_to_redact(secrets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_use().text("a canary-12345, a canary-12345-67890") == "a ***API_KEY***, a ***LONGER***"
    monkeypatch.delenv("API_KEY")
    assert in_use().text("canary-12345") == "***API_KEY***", "a program may delete what it has read"
    monkeypatch.delenv(LISTED)
    assert not in_use()


@given(
    st.lists(st.sampled_from(["canary-12345", "canary-12345-67890", "canary", "c", "an", "12345\n", "x"])), st.data()
)
def test_a_value_in_pieces_is_found(words: list[str], data: st.DataObject) -> None:
    redactor = Redactor({"API_KEY": "canary-12345", "LONGER": "canary-12345-67890"})
    whole = "".join(words).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secret_redaction, "in_use", lambda: redactor)
        stream = RedactedStream()
        pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        written = b"".join([*map(stream.redact, pieces), stream.flush()])
    assert b"canary-12345" not in written
    if b"canary-12345-67890" not in whole:  # of one that another one begins with, the rest may come too late
        assert written == redactor.data(whole)


def test_only_what_may_be_a_beginning_is_held_back(secrets: None) -> None:
    stream = RedactedStream()
    assert stream.redact(b"step 1\n") == b"step 1\n"
    assert stream.redact(b"the key is canary-1") == b"the key is "
    assert stream.redact(b"3 and so on\n") == b"canary-13 and so on\n"
