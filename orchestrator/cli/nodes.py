"""`orch nodes`: the nodes that runs have used, and those that are kept away from."""

import time

import click

from orchestrator.cli.options import Noun
from orchestrator.cli.registry import open_store
from orchestrator.cli.render import Column, Screen, count, iso, span


@click.group(cls=Noun)
def nodes() -> None:
    """Nodes that runs have used, and those kept away from."""


@nodes.command("ls")
@click.pass_obj
def ls(screen: Screen) -> None:
    """Every node seen: attempts, failures, and until when it is excluded and why."""
    now = time.time()
    with open_store(readonly=True) as store:
        rows = [
            {
                "node": node.name,
                "cluster": node.cluster,
                "attempts": node.attempts,
                "failures": node.failures,
                "first_seen": iso(node.first_seen),
                "last_seen": iso(node.last_seen),
                "excluded_until": iso(node.excluded_until) if node.excluded_until > now else None,
                "reason": node.reason,
                "_ago": now - node.last_seen,
                "_left": node.excluded_until - now if node.excluded_until > now else None,
            }
            for node in store.nodes()
        ]
    if screen.json:
        screen.data("nodes.ls", [{key: row[key] for key in row if not key.startswith("_")} for row in rows])
        return
    people = screen.terminal
    columns = [
        Column("NODE", "node"),
        Column("CLUSTER", "cluster"),
        Column("ATTEMPTS", "attempts", count, right=True),
        Column("FAILURES", "failures", count, right=True),
        Column("LAST SEEN", "_ago", lambda age: f"{span(age)} ago") if people else Column("LAST_SEEN", "last_seen"),
        Column("EXCLUDED FOR", "_left", span) if people else Column("EXCLUDED_UNTIL", "excluded_until"),
        Column("WHY", "reason"),
    ]
    screen.table(columns, rows)
    if not rows:
        screen.note("no attempt has run on any node yet")
