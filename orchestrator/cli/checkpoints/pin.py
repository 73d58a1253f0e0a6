"""`orch ckpt pin` and `orch ckpt unpin`: checkpoints that retention must leave alone."""

import time
from typing import TYPE_CHECKING

import click

from orchestrator.cli.access.run_folder import existing_folder
from orchestrator.cli.checkpoints.target import Target, find, is_location, known_run, target_at
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from checkpointing.storage.backends import Storage


@click.command("pin", cls=Verb)
@click.argument("target", metavar="RUN[@STEP]")
@click.option("--note", default="", help="Why you keep it.")
@click.pass_obj
def pin(screen: Screen, target: str, note: str) -> None:
    """Keep a checkpoint, whatever retention says, until `orch ckpt unpin`."""
    from checkpointing.retention import garbage

    copies = find(target, screen.warn)
    found, note = copies[0], " ".join(note.split())
    garbage.pin(_pins(found, target), found.name, note, time.time())
    # Retention may have taken it while we wrote.
    if not any(_is_there(copy) for copy in copies if copy.name == found.name):
        garbage.unpin(_pins(found, target), found.name)
        raise NotFound(f"{found.name} was deleted at this very moment", where=found.path, hint="pin a newer one")
    screen.say(f"{found.name}: pinned{f' ({note})' if note else ''}")
    if screen.json:
        screen.data("ckpt.pin", {"name": found.name, "path": found.path, "pinned": True, "note": note})


@click.command("unpin", cls=Verb)
@click.argument("target", metavar="RUN@STEP")
@click.pass_obj
def unpin(screen: Screen, target: str) -> None:
    """Return a checkpoint to retention."""
    from checkpointing.retention import garbage

    storage, names = _pinned(target)
    if not names:
        raise NotFound(
            f"{target} is not pinned", hint=f"`orch ckpt ls {target.rpartition('@')[0] or 'RUN'}` shows what is"
        )
    for name in names:
        garbage.unpin(storage, name)
        screen.say(f"{name}: no longer pinned")
    if screen.json:
        screen.data("ckpt.unpin", [{"name": name, "pinned": False} for name in names])


def _pins(target: Target, words: str) -> "Storage":
    from checkpointing.storage.backends import LocalStorage

    if target.run_dir is None:
        raise ConfigError("only a checkpoint of a run can be pinned", where=words, hint="write RUN@STEP")
    return LocalStorage(target.run_dir.checkpoints)


def _is_there(target: Target) -> bool:
    from checkpointing.tiers.catalog import Catalog

    return Catalog(target.path.rpartition("/")[0], target.storage).is_committed(target.name)


def _pinned(words: str) -> "tuple[Storage, list[str]]":
    """The pins that are meant: also of a checkpoint that is not there any more."""
    from checkpointing.format.commit import parse_name
    from checkpointing.retention.garbage import pinned_names
    from checkpointing.storage.backends import LocalStorage

    if is_location(words):
        target = target_at(words)
        storage = _pins(target, words)
        return storage, [name for name in pinned_names(storage) if name == target.name]
    run, mark, step = words.rpartition("@")
    if not mark or not run:
        raise ConfigError("say which checkpoint", where=words, hint="write RUN@STEP")
    known = known_run(run)
    storage = LocalStorage(existing_folder(known.name, known.run_dir).checkpoints)
    parsed = {name: parts for name in pinned_names(storage) if (parts := parse_name(name))}
    return storage, sorted(name for name, parts in parsed.items() if step in (name, str(parts.step)))
