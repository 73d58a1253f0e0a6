"""`orch data`: convert documents to memory-mapped token shards, and mix them."""

import math
import shlex
import time
from pathlib import Path

import click

from orchestrator.cli.terminal.argument_types import NonEmptyPath
from orchestrator.cli.terminal.command_classes import Noun
from orchestrator.cli.terminal.render import Screen, count, span
from orchestrator.cli.terminal.streams import writing_to
from orchestrator.errors import ConfigError, NotFound


@click.group(cls=Noun)
def data() -> None:
    """Turn documents into token shards for training."""


@data.command("prepare")
@click.argument("paths", nargs=-1, required=True, type=NonEmptyPath())
@click.option("--out", required=True, type=NonEmptyPath(path_type=Path), help="Folder for the shards; may be new.")
@click.option("--tokenizer", default="", metavar="FOLDER|NAME", help="Tokenizer of transformers; without it, bytes.")
@click.option("--field", default="text", show_default=True, help="Field that has the text of a row.")
@click.pass_obj
def prepare(screen: Screen, paths: tuple[str, ...], out: Path, tokenizer: str, field: str) -> None:
    """Tokenize files, folders and URLs into shards for `data.path`.

    A text file is one document. JSON lines (also .gz), Parquet, Arrow, and Hugging Face datasets on disk have one in
    each row: its text, or `prompt` and `completion`, or a chat as `messages`. Of the last two, only the completion and
    the assistant's words are trained. `python-stdlib` is the source text of Python's standard library.

    A folder that already holds the same tokens is compared and kept. The exit code is 2 if it holds anything else or a
    changed shard, or if there is nothing to read.
    """
    from orchestrator.tokenization import shard_writer
    from orchestrator.tokenization.documents import STDLIB
    from orchestrator.tokenization.tokenizers import load_tokenizer
    from trainer.protocol.token_shards import TokensError

    missing = [path for path in paths if path != STDLIB and "://" not in path and not Path(path).expanduser().exists()]
    if missing:
        hint = f"give files, folders, URLs, or {STDLIB}"
        raise NotFound(f"no such text: {missing[0]}", where="command line: PATHS", hint=hint)
    screen.if_interrupted = lambda: f"interrupted: {out} is {'complete' if any(out.glob('*')) else 'not written'}"
    started = time.monotonic()
    with screen.bar("tokenizing") as meter, writing_to(out.absolute()):
        try:
            index = shard_writer.prepare(paths, out, meter, tokenizer=load_tokenizer(tokenizer), field=field)
        except TokensError as error:
            raise ConfigError(str(error), where="orch data prepare", hint="orch data prepare -h") from error
    seconds = time.monotonic() - started
    answer = {
        "path": str(out), "tokens": index.tokens, "shards": len(index.shards), "dtype": index.dtype,
        "fingerprint": index.fingerprint, "seconds": round(seconds, 3),
    }  # fmt: skip
    text = f"{count(index.tokens)} tokens in {len(index.shards)} shards in {out}  ({span(seconds)})"
    train = f"train on them with  {shlex.quote(f'data.path={out}')} '~data.text'"
    screen.answer("data.prepare", answer, text, note=f"fingerprint {index.fingerprint}\n{train}")


def _parse_weighted(text: str) -> tuple[Path, float]:
    """Return a folder and its weight from `FOLDER=WEIGHT`. Raises ConfigError."""
    folder, _, weight = text.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not folder or not 0 < number < math.inf:
        raise ConfigError(
            f"{text}: must be a token folder and its weight above 0", where="command line: FOLDER=WEIGHT",
            hint="orch data mix /data/web=0.7 /data/code=0.3 --out /data/mixed",
        )  # fmt: skip
    return Path(folder).expanduser(), number


@data.command("mix")
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER=WEIGHT...")
@click.option("--out", required=True, type=NonEmptyPath(path_type=Path), help="Folder for the mixture; may be new.")
@click.pass_obj
def mix(screen: Screen, folders: tuple[str, ...], out: Path) -> None:
    """Mix token folders by weight, for `data.path`; the mixture refers to them.

    Weights are shares of the sequences, relative to each other. Each folder has epochs of its own: one with a large
    weight is read again before the others are read once.
    """
    from orchestrator.tokenization.shard_writer import mix_folders
    from trainer.protocol.token_shards import TokensError

    try:
        weights = list(map(_parse_weighted, folders))
        with writing_to(out.absolute()):
            index = mix_folders(weights, out)
    except TokensError as error:
        raise ConfigError(str(error), where="command line: FOLDER=WEIGHT", hint="orch data mix -h") from error
    total = sum(weight for _, weight in weights)
    shares = ", ".join(f"{folder} {weight / total:.1%}" for folder, weight in weights)
    answer = {
        "path": str(out), "tokens": index.tokens, "fingerprint": index.fingerprint,
        "folders": [{"path": part.path, "share": part.weight / total} for part in index.parts],
    }  # fmt: skip
    train = f"train on them with  {shlex.quote(f'data.path={out}')} '~data.text'"
    screen.answer("data.mix", answer, f"{shares} in {out}", note=f"fingerprint {index.fingerprint}\n{train}")
