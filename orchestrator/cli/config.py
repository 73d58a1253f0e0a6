"""`orch config`: resolve, validate and compare configurations."""

import os
import re
from pathlib import Path
from typing import Any

import click

from checkpointing.storage.durable import dump_line
from orchestrator.cli.terminal.command_classes import Noun
from orchestrator.cli.terminal.render import Column, Screen
from orchestrator.config.redaction import redact_config, redacted_origins, redacted_value
from orchestrator.errors import ConfigError, NotFound, OrchError
from orchestrator.home import registry_path

SOURCE = click.argument("source", metavar="CONFIG")
DIGITS = 6
"""Minimum number of digits that identify a stored configuration."""
OVERRIDES = click.argument("overrides", metavar="[KEY=VALUE ...]", nargs=-1)


@click.group(cls=Noun)
def config() -> None:
    """Show, validate and compare configurations.

    CONFIG is the name of a preset (`tiny-gpt`) or the path of a YAML file.
    """


@config.command("show")
@SOURCE
@OVERRIDES
@click.option("--origin/--no-origin", default=True, show_default=True, help="Print where each value came from.")
@click.pass_obj
def show(screen: Screen, source: str, overrides: tuple[str, ...], origin: bool) -> None:
    """Print the resolved configuration, every value with its origin."""
    composed = _compose(source, overrides)
    if screen.json:
        answer = {"config": redact_config(composed.data), "origins": redacted_origins(composed.origins)}
        screen.data("config.show", {"digest": composed.digest, **answer})
        return
    print_config(screen, composed.data, composed.origins if origin else {})
    screen.note(f"digest {composed.digest[:12]}")


def print_config(screen: Screen, data: dict[str, Any], origins: dict[str, str]) -> None:
    """Print one `key = value  # origin` line per value."""
    from orchestrator.config.compose import flat

    shown = redacted_origins(origins)
    lines = [(f"{key} = {dump_line(value)}", shown.get(key, "")) for key, value in flat(redact_config(data)).items()]
    width = min(60, max(len(line) for line, _ in lines))
    for line, where in lines:
        screen.raw(f"{line:<{width}}  # {where}" if where else line)


@config.command("validate")
@SOURCE
@OVERRIDES
@click.pass_obj
def validate(screen: Screen, source: str, overrides: tuple[str, ...]) -> None:
    """Check keys, types, ranges and sizes, and that the code exists.

    It looks for the script of a `command:`, and for the class and methods of a workload, without importing
    anything. It checks that Slurm can read every value of `cluster`, but does not ask Slurm; `orch submit
    --dry-run` does. The exit code is 2, with the reason, if the configuration is invalid.
    """
    from orchestrator.submission import user_code  # ast: only where code is inspected

    composed = _compose(source, overrides)
    user_code.check(composed.config)
    warn_about_config(screen, composed.config)
    if screen.json:
        screen.data("config.validate", {"valid": True, "digest": composed.digest})
    else:
        screen.say(f"{source}: valid, digest {composed.digest[:12]}")


@config.command("diff")
@click.argument("first")
@click.argument("second")
@click.pass_obj
def diff(screen: Screen, first: str, second: str) -> None:
    """List the keys in which two configurations differ.

    Each is a preset, a YAML file, a run, or the digest of a stored configuration (6 digits or more). The exit code
    is 0 whether or not they differ.
    """
    from orchestrator.config import compose

    differs = compose.diff(find_config(first), find_config(second))
    changed = {key: (redacted_value(key, old), redacted_value(key, new)) for key, (old, new) in differs.items()}
    if screen.json:
        rows = [{"key": key, "first": old, "second": new} for key, (old, new) in changed.items()]
        screen.data("config.diff", rows)
    elif changed:
        shown = [{"key": key, "old": dump_line(old), "new": dump_line(new)} for key, (old, new) in changed.items()]
        screen.table([Column("KEY", "key"), Column(first, "old"), Column(second, "new")], shown)
    else:
        screen.note("no difference")


def _compose(source: str, overrides: tuple[str, ...]) -> Any:
    from orchestrator.config.compose import compose  # omegaconf: only for the verbs that read configurations

    try:
        return compose(source, overrides, environ=os.environ)
    except NotFound as error:
        if (run := find_exact_run(source)) is not None:
            shows = f"`orch show {run}` shows it; `orch config diff {run} CONFIG` compares its configuration"
            raise NotFound(f"{source} is a run, and no preset or file", where=error.where, hint=shows) from error
        raise


def warn_about_config(screen: Screen, config: Any) -> None:
    """Warn of misspelled method names, modules that a job resolves elsewhere, and pipelines with much idle time."""
    from orchestrator.submission.pipeline_warning import few_micro_batches
    from orchestrator.submission.user_code import (
        near_methods,  # ast: only where code is inspected
        shadowed_helpers,
    )

    for words in near_methods(config):
        screen.warn("near_method", words)
    for words in shadowed_helpers(config):
        screen.warn("shadowed_module", words)
    if waits := few_micro_batches(config):
        screen.warn("few_micro_batches", waits)


def find_exact_run(name: str) -> str | None:
    """Return the run with exactly this name, or `@last`; None without one or if the registry is unreadable."""
    from orchestrator.cli.runs.status import one_row  # only after a mistake

    try:
        run = str(one_row(name)["run"]) if name.strip() and registry_path().exists() else None
    except OrchError:
        return None
    return run if name in (run, "@last") else None


def find_config(name: str) -> dict[str, Any]:
    """Return the configuration called `name`: a file, a preset, or a run or digest in the registry."""
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return _data(_compose(name, ()))
    try:
        return _data(_compose(name, ()))
    except (ConfigError, NotFound) as error:
        stored = _find_stored_config(name)
        if stored is not None:
            return stored
        if isinstance(error, NotFound) and (near := _near_run(name)):
            raise NotFound(f"no preset, file or run `{name}`", where=error.where, hint=near) from error
        if isinstance(error, NotFound) and re.fullmatch(r"[0-9a-f]{4,64}", name):
            what = f"no preset, file or run `{name}`, and no stored configuration whose digest begins so"
            hint = f"type {DIGITS} or more digits of a digest in `orch show RUN`, or the run"
            raise NotFound(what, where=error.where, hint=hint) from error
        raise


def _near_run(name: str) -> str:
    """Return the registry's suggestion for a misspelled run name; empty if none is close."""
    from orchestrator.cli.access.registry import open_store

    if not registry_path().exists():
        return ""
    try:
        with open_store(readonly=True) as store:
            store.run(name)
    except NotFound as error:
        return error.hint if error.hint.startswith("did you mean") else ""
    return ""


def _data(composed: Any) -> dict[str, Any]:
    data: dict[str, Any] = composed.data
    return data


def _find_stored_config(name: str) -> dict[str, Any] | None:
    from orchestrator.registry.store import Store  # sqlalchemy: only where the registry is read in full

    if not registry_path().exists():
        return None
    with Store.open(registry_path(), readonly=True) as store:
        try:
            digest = store.run(name).config_digest
        except NotFound:
            digests = store.config_digests() if len(name) >= DIGITS else set()
            digest = next((item for item in digests if item.startswith(name)), name)
        try:
            return store.config(digest)
        except NotFound:
            return None
