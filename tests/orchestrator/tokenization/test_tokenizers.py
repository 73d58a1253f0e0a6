"""Tokenizers of transformers: what is trained in chats and prompts, and the same rows from every kind of file."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tokenization import shard_writer
from orchestrator.tokenization.documents import Document
from orchestrator.tokenization.tokenizers import Encoded
from trainer.worker.data import TokenStream

ROOT = Path(__file__).resolve().parents[3]
PARTS = [ROOT / ".venv" / name for name in ("interop", "finetuning")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not all((part / ".ready").is_file() for part in PARTS):
        pytest.skip("transformers and pyarrow are not installed apart: `make test` does that")
    words = [
        sys.executable,
        str(Path(__file__).with_name("tokenize_documents.py")),
        str(tmp_path_factory.mktemp("rows")),
    ]
    environ = {**os.environ, "PYTHONPATH": ":".join(map(str, (ROOT, *PARTS))), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_text_ends_with_the_tokenizers_end(found: dict[str, Any]) -> None:
    assert found["text"]["all"] == found["text"]["trained"] == "what is this?<eos>"
    assert found["text"]["tokenizer"].endswith("/tokenizer")
    assert 256 < found["text"]["vocab_size"] <= 400


def test_of_a_chat_the_assistants_words_and_their_end_are_trained(found: dict[str, Any]) -> None:
    turn = "<|user|>what?<eos><|assistant|>größe ok<eos>"
    assert found["chat"]["all"] == turn * 3
    assert found["chat"]["trained"] == "größe ok<eos>" * 3


def test_of_a_prompt_with_its_completion_the_completion_is_trained(found: dict[str, Any]) -> None:
    assert found["prompts"]["all"] == "what is this<eos>"
    assert found["prompts"]["trained"] == " this<eos>"


def test_rows_give_the_same_tokens_from_every_kind_of_file(found: dict[str, Any]) -> None:
    assert found["lines"]["all"] == "größe, wörter<eos>zwei<eos>"
    assert {found[kind]["fingerprint"] for kind in ("lines", "parquet", "dataset")} == {found["lines"]["fingerprint"]}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("splits", "has several splits (train): name one"),
        ("forgetful", "changes earlier turns, so the assistant's words cannot be found"),
        ("silent", "silent.jsonl: a chat has no message of the assistant"),
        ("nothing", "no tokenizer in"),
    ],
)
def test_what_would_train_the_wrong_words_is_refused(found: dict[str, Any], kind: str, told: str) -> None:
    assert told in found[kind]


class LargeVocabulary:
    """Tokenizer with more tokens than 16 bits hold."""

    name, vocab_size, digest = "large", 200_000, "of large"

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        for one in documents:
            yield [199_999, len(one.text), 70_000], [False, True, True] if one.has_mask else None


@pytest.mark.parametrize(
    ("row", "first"), [({"text": "abc"}, 199_999), ({"prompt": "a", "completion": "bc"}, ~199_999)]
)
def test_a_large_vocabulary_has_numbers_of_32_bits(tmp_path: Path, row: dict[str, str], first: int) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    index = shard_writer.prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=LargeVocabulary())
    assert (index.dtype, index.vocab_size) == ("int32", 200_000)
    assert TokenStream(tmp_path / "out").slice(0, 3).tolist() == [first, 3, 70_000]
