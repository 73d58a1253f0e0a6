"""Tokenizers: bytes, or any tokenizer of transformers with its chat template."""

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator.tokenization.documents import Document
from trainer.protocol.token_shards import TokensError

SEPARATOR = 256
"""Token of the byte tokenizer that ends a document."""

Encoded = tuple[Sequence[int], Sequence[bool] | None]
"""Tokens of a document, and which of them are trained; None: all."""


class Tokenizer(Protocol):
    """Converter of documents to tokens."""

    name: str
    vocab_size: int
    digest: str
    """Digest of the vocabulary and its rules."""

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        """Yield the tokens of each document, with its end. Raises TokensError."""


class ByteTokenizer:
    """Tokenizer without a vocabulary: tokens 0..255 are bytes, and 256 ends a document."""

    name, vocab_size, digest = "", SEPARATOR + 1, ""

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        for one in documents:
            if one.messages is not None:
                raise TokensError("chats need a tokenizer with a chat template: --tokenizer FOLDER, or data.tokenizer")
            tokens = [*one.text.encode(), SEPARATOR]
            hidden = len(one.text[: one.untrained or 0].encode())
            yield tokens, [place >= hidden for place in range(len(tokens))] if one.has_mask else None


class HubTokenizer:
    """Tokenizer of transformers, from a folder or the hub's cache."""

    def __init__(self, name: str) -> None:
        """Load it. Raises TokensError."""
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise TokensError(f"a tokenizer needs transformers: pip install 'transformers>=5' ({error})") from error
        folder = Path(name).expanduser()
        self.name = str(folder.resolve()) if folder.is_dir() else name
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(self.name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TokensError(f"no tokenizer in {name}: {(str(error) or repr(error)).splitlines()[0]}") from error
        if not self._tokenizer.is_fast:
            raise TokensError(f"the tokenizer in {name} has no tokenizer.json, which finds the trained part of a chat")
        self._end = self._tokenizer.eos_token_id
        if self._end is None:
            raise TokensError(f"the tokenizer in {name} has no eos_token, which ends a document")
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1  # some vocabularies have gaps
        text = self._tokenizer.backend_tokenizer.to_str()
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        try:
            self._template_error: type[Exception] = importlib.import_module("jinja2").TemplateError
        except ImportError:
            self._template_error = ImportError

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        """Yield the tokens of each document. Text ends with the tokenizer's eos_token, a chat as its template says."""
        texts = [self._render(one, one.messages) if one.messages else one.text for one in documents]
        encoded = self._tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        for one, text, tokens, places in zip(
            documents, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            spans = self._trained_spans(one, text) if one.messages else [(one.untrained or 0, len(text))]
            end = [] if one.messages is not None or (tokens and tokens[-1] == self._end) else [self._end]
            trained = [any(begin < last and first < end_ for first, last in spans) for begin, end_ in places]
            yield [*tokens, *end], [*trained, *(True for _ in end)] if one.has_mask else None

    def _render(self, chat: Document, messages: Sequence[Any], *, is_prompt: bool = False) -> str:
        if not messages:
            return ""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=list(chat.tools) or None, tokenize=False, add_generation_prompt=is_prompt
                )
            )
        except (ValueError, TypeError, LookupError, ImportError, self._template_error) as error:
            raise TokensError(f"the chat template of {self.name} refuses a chat: {error}") from error

    def _trained_spans(self, chat: Document, text: str) -> list[tuple[int, int]]:
        """Return the places of the assistant's words, with the end of each turn, in the rendered chat.

        They are what a turn adds to the prompt for it. Raises TokensError for a template that changes earlier turns.
        """
        spans, messages = [], chat.messages or ()
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self._render(chat, messages[:number], is_prompt=True)
            turn = self._render(chat, messages[: number + 1])
            if not (text.startswith(turn) and turn.startswith(prompt)):
                raise TokensError(
                    f"the chat template of {self.name} changes earlier turns, so the assistant's words cannot be "
                    "found: give rows with prompt and completion"
                )
            spans.append((len(prompt), len(turn)))
        if not spans:
            raise TokensError("a chat has no message of the assistant, so nothing in it would be trained")
        return spans


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer named so; "" is the one of bytes. Raises TokensError."""
    return HubTokenizer(name) if name else ByteTokenizer()
