"""Access to the registry and the controller, with deferred imports, and errors that name the command to run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import Fenced
from orchestrator.home import make_state_home, registry_path
from orchestrator.run_view import require_registry

if TYPE_CHECKING:
    from orchestrator.registry.store import Store


@contextmanager
def open_store(*, readonly: bool = False, create: bool = False) -> "Iterator[Store]":
    """Open the registry. Raises NotFound if it does not exist and `create` is false."""
    # sqlalchemy: imported only by verbs that need the whole registry
    from orchestrator.registry.run_record import write_records
    from orchestrator.registry.store import Store

    path = registry_path()
    if create:
        make_state_home()
    else:
        require_registry()
    with Store.open(path, readonly=readonly) as store:
        store.database.after_commit = lambda runs: write_records(store, runs, missed=_warn_of_record)
        yield store


def _warn_of_record(words: str) -> None:
    context = click.get_current_context(silent=True)
    screen = context.find_object(Screen) if context is not None else None
    (screen or Screen()).warn("record_not_written", words)


def wake_controller(screen: Screen, kind: str, *, no_controller: bool) -> str:
    """Make sure that a controller handles the recorded request, or run one controller pass in this process.

    Returns why the scheduler did not answer this process; empty if it answered or a controller is handling the request.
    """
    from orchestrator.controller import service

    if not no_controller:
        if service.ensure_running(registry_path(), kind):
            screen.note("no controller was alive: started one")
        return ""
    report = service.tick_once(registry_path(), kind)
    if report is None:
        screen.note("another controller holds the lease and will handle this")
        return ""
    return "; ".join(report.silence)


def act_as_controller(screen: Screen, kind: str, known: tuple[str, ...], **options: Any) -> tuple[str, ...]:
    """Run a controller pass; return the schedulers that did not answer. Those in `known` are not reported again."""
    from orchestrator.controller import service

    try:
        report = service.tick_once(registry_path(), kind, **options)
    except Fenced:  # a controller has become active in the meantime
        return ()
    silent: tuple[str, ...] = report.unreachable if report is not None else ()
    if silent and silent != known:
        screen.note(f"{' and '.join(silent)} does not answer; nothing is assumed, asking again")
    return silent
