"""`orch data prepare`: convert text files to memory-mapped token shards."""

import shlex
import time
from pathlib import Path

import click

from orchestrator.cli.terminal.argument_types import NonEmptyPath
from orchestrator.cli.terminal.command_classes import Noun
from orchestrator.cli.terminal.render import Screen, count, span
from orchestrator.errors import ConfigError, NotFound


@click.group(cls=Noun)
def data() -> None:
    """Turn text into token shards for training."""


@data.command("prepare")
@click.argument("paths", nargs=-1, required=True, type=NonEmptyPath())
@click.option("--out", required=True, type=NonEmptyPath(path_type=Path), help="Folder for the shards; may be new.")
@click.pass_obj
def prepare(screen: Screen, paths: tuple[str, ...], out: Path) -> None:
    """Tokenize text files and folders, byte by byte, into shards for `data.path`.

    `python-stdlib` is the source text of Python's standard library. If the folder already holds the same tokens, its
    shards are read and compared, and it is kept. The exit code is 2 if the folder holds anything else or a changed
    shard, or if there is nothing to read.
    """
    from trainer.protocol import token_shards

    missing = [path for path in paths if path != token_shards.STDLIB and not Path(path).expanduser().exists()]
    if missing:
        hint = f"give text files, folders, or {token_shards.STDLIB}"
        raise NotFound(f"no such text: {missing[0]}", where="command line: PATHS", hint=hint)
    screen.if_interrupted = lambda: f"interrupted: {out} is {'complete' if any(out.glob('*')) else 'not written'}"
    started = time.monotonic()
    with screen.bar("tokenizing") as meter:
        try:
            index = token_shards.prepare(paths, out, meter)
        except token_shards.TokensError as error:
            raise ConfigError(str(error), where=f"command line: --out {out}", hint="orch data prepare -h") from error
    seconds = time.monotonic() - started
    answer = {
        "path": str(out), "tokens": index.tokens, "shards": len(index.shards), "dtype": index.dtype,
        "fingerprint": index.fingerprint, "seconds": round(seconds, 3),
    }  # fmt: skip
    text = f"{count(index.tokens)} tokens in {len(index.shards)} shards in {out}  ({span(seconds)})"
    train = f"train on them with  {shlex.quote(f'data.path={out}')} '~data.text'"
    screen.answer("data.prepare", answer, text, note=f"fingerprint {index.fingerprint}\n{train}")
