"""`orch config`: resolve, validate and compare configurations."""

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpointing.storage.durable import dump_line
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.terminal.command_classes import Noun
from orchestrator.cli.terminal.render import Column, Screen
from orchestrator.config.redaction import redact_config, redacted_origins, redacted_value
from orchestrator.errors import ConfigError, NotFound, OrchError
from orchestrator.run_view import find_run

if TYPE_CHECKING:
    from orchestrator.registry.store import Store

SOURCE = click.argument("source", metavar="CONFIG")
DIGITS = 6
"""Minimum number of digest digits that select a stored configuration."""
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
    composed = compose_config(source, overrides)
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
    anything. It checks that Slurm can parse every value in `cluster`, but does not query Slurm; `orch submit
    --dry-run` does. The exit code is 2, with the reason, if the configuration is invalid.
    """
    from orchestrator.submission import user_code  # ast: only where code is inspected

    composed = compose_config(source, overrides)
    user_code.check(composed.config)
    warn_about_config(screen, composed.config)
    answer = {"valid": True, "digest": composed.digest}
    screen.answer("config.validate", answer, f"{source}: valid, digest {composed.digest[:12]}")


@config.command("diff")
@click.argument("first")
@click.argument("second")
@click.pass_obj
def diff(screen: Screen, first: str, second: str) -> None:
    """List the keys whose values differ between two configurations.

    FIRST and SECOND are each a preset, a YAML file, a run, or the digest of a stored configuration (6 digits or
    more). The exit code is 0 whether or not they differ.
    """
    from orchestrator.config import compose

    differs = compose.diff(_find_config(first), _find_config(second))
    changed = {key: (redacted_value(key, old), redacted_value(key, new)) for key, (old, new) in differs.items()}
    if screen.json:
        rows = [{"key": key, "first": old, "second": new} for key, (old, new) in changed.items()]
        screen.data("config.diff", rows)
    elif changed:
        shown = [{"key": key, "old": dump_line(old), "new": dump_line(new)} for key, (old, new) in changed.items()]
        screen.table([Column("KEY", "key"), Column(first, "old"), Column(second, "new")], shown)
    else:
        screen.note("no difference")


def compose_config(source: str, overrides: tuple[str, ...]) -> Any:
    """Return the configuration. Raises NotFound, with the right commands as the hint if a run has this name."""
    from orchestrator.config.compose import compose  # omegaconf: only for the verbs that read configurations

    try:
        return compose(source, overrides, environ=os.environ)
    except NotFound as error:
        with suppress(OrchError):  # no run has this name, or the registry is unreadable
            run = find_run(source).run
            if source in (run, "@last"):
                more = shlex.join([run, *overrides])
                error.what = f"{source} is a run, not a preset or file"
                error.hint = f"orch show {run}   orch resume {more}   or a new run:  orch submit --from {more}"
        raise


def warn_about_config(screen: Screen, config: Any) -> None:
    """Warn about misspelled methods, modules that a job would import from elsewhere, and idle pipeline stages."""
    from orchestrator.submission import user_code  # ast: only where code is inspected
    from trainer.costs.micro_batches import too_few

    for message in user_code.near_methods(config):
        screen.warn("near_method", message)
    for message in user_code.shadowed_helpers(config):
        screen.warn("shadowed_module", message)
    parallel = config.parallel
    if parallel.pipeline.stages > 1 and config.trains_built_in_workload:
        ranks = parallel.data_parallel_size(config.cluster.world_size)
        if idle_warning := too_few(parallel.pipeline, config.train, ranks):
            screen.warn("few_micro_batches", idle_warning)


def _find_config(name: str) -> dict[str, Any]:
    try:
        return dict(compose_config(name, ()).data)
    except (ConfigError, NotFound) as error:
        if not (name.endswith((".yaml", ".yml")) or Path(name).is_file()):
            with suppress(NotFound), open_store(readonly=True) as store:
                return _stored_config(store, name)
        if isinstance(error, NotFound):
            error.hint += f"; or name a run, or give {DIGITS} or more digits of a digest from `orch show RUN`"
        raise


def _stored_config(store: "Store", name: str) -> dict[str, Any]:
    try:
        digest = store.run(name).config_digest
    except NotFound:
        digests = store.config_digests() if len(name) >= DIGITS else set()
        digest = next((item for item in digests if item.startswith(name)), name)
    return store.config(digest)
