"""Data that does not fit the model and its sequences is refused before anything is written, with sizes that fit."""

from pathlib import Path

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError
from orchestrator.submission.create_run import prepare_data
from orchestrator.tokenization import shard_writer
from tests.trainer.parallel.grid import words_of_hint


def check(tokens: Path, folder: Path, *typed: str) -> None:
    words = ["~data.text", f"data.path={tokens}", *typed]
    composed = compose("tiny-gpt", words, environ={"HOME": str(folder), "ORCH_SITE_CONFIG": ""})
    prepare_data(composed.config, composed.data, folder)


@pytest.mark.parametrize(
    ("typed", "what", "hint"),
    [
        ("model.vocab_size=200", "vocabulary has 257 tokens", "set model.vocab_size=257"),
        # 100 bytes and a separator: the last token of a sequence is only a target; tp=2 and five chunks divide 100
        (
            "train.seq_len=160 train.loss_chunks=5",
            "train.seq_len=160, but the data has only 101 tokens",
            "set train.seq_len=100",
        ),
        # five sequences, of which one at least is trained on
        (
            "train.seq_len=20 train.batch_size=2 train.micro_batch_size=0 validation.batches=3",
            "validation.batches=3 holds out more than the data's 101 tokens",
            "set validation.batches=2",
        ),
    ],
)
def test_sizes_that_fit_the_data_are_offered(tmp_path: Path, typed: str, what: str, hint: str) -> None:
    (tmp_path / "text").write_bytes(b"x" * 100)
    shard_writer.prepare([tmp_path / "text"], tmp_path / "tokens")
    with pytest.raises(ConfigError, match=what) as refused:
        check(tmp_path / "tokens", tmp_path, *typed.split())
    offered = refused.value.hint.removesuffix(", or provide more text")
    assert offered == hint
    fits = "train.seq_len=20" if "vocab" in typed else ""
    check(tmp_path / "tokens", tmp_path, *typed.split(), *fits.split(), *words_of_hint(offered))
