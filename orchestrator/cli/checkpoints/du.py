"""`orch ckpt du`: how much room checkpoints take, and how much of it `orch ckpt gc` would free."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpointing.storage.storage_errors import error_words
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import warn_of_missing
from orchestrator.cli.checkpoints.gc import gc_candidates_in
from orchestrator.cli.checkpoints.tiers import tiers_of
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, size
from trainer.contract.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.registry.records import Run
    from orchestrator.registry.store import Store

DEBRIS = "debris"


@click.command("du", cls=Verb)
@click.argument("runs", metavar="[RUN...]", nargs=-1)
@click.pass_obj
def du(screen: Screen, runs: tuple[str, ...]) -> None:
    """Print the bytes of checkpoints by run, tier and trust; without RUN, of every run."""
    with open_store(readonly=True) as store:
        chosen = [store.run(name) for name in runs] if runs else store.runs()
        rows = [row for run in chosen for row in _rows(screen, store, run)]
    total, frees = sum(row["bytes"] for row in rows), sum(row["collectable"] for row in rows)
    if screen.json:
        screen.data("ckpt.du", rows)
        return
    columns = [
        Column("RUN", "run"),
        Column("TIER", "tier"),
        Column("TRUST", "trust"),
        Column("COUNT", "count", count, right=True),
        Column("SIZE", "bytes", size, right=True),
        Column("GC FREES", "collectable", size, right=True),
    ]
    screen.table(columns, sorted(rows, key=lambda row: -row["bytes"]))
    screen.note(f"{size(total)} in all" + (f"; `orch ckpt gc --all` frees {size(frees)}" if frees else ""))


def _rows(screen: Screen, store: "Store", run: "Run") -> Iterator[dict[str, Any]]:
    """One row for each tier and trust, and one for what is no checkpoint."""
    warn_of_missing(screen, run.name, run.run_dir)
    trust = {row.name: str(row.trust) for row in store.checkpoints(run.name)}
    for tier in tiers_of(RunDir(Path(run.run_dir))):
        sums: dict[str, dict[str, Any]] = {}
        try:
            committed = {entry.name for entry in tier.catalog.committed()}
            for name in tier.catalog.names():
                kind = trust.get(name, "COMMITTED") if name in committed else DEBRIS
                empty = {"run": run.name, "tier": tier.label, "trust": kind, "count": 0, "bytes": 0, "collectable": 0}
                row = sums.setdefault(kind, empty)
                row["count"] += 1
                row["bytes"] += sum(length or 0 for length in tier.storage.list(name).values())
            if DEBRIS in sums:
                deletable = [item.bytes for item in gc_candidates_in(store, run, tier) if item.deletable]
                sums[DEBRIS]["collectable"] = sum(deletable)
        except OSError as error:
            screen.warn("TierUnreadable", f"{run.name}: tier {tier.label} cannot be read: {error_words(error)}")
        yield from sums.values()
