"""`orch nodes`: the nodes that runs have used, and those that are kept away from."""

import time
from typing import Any

import click

from orchestrator.cli.access.registry import open_store, wake_controller
from orchestrator.cli.access.run_location import locate_run
from orchestrator.cli.runs.cancel_resume import NO_CONTROLLER, await_answers
from orchestrator.cli.terminal.command_classes import Noun
from orchestrator.cli.terminal.render import Column, Screen, count, iso, span
from orchestrator.errors import NotFound


@click.group(cls=Noun)
def nodes() -> None:
    """List the nodes that runs have used; release excluded ones."""


@nodes.command("ls")
@click.pass_obj
def ls(screen: Screen) -> None:
    """List every node: attempts, failures, until when it is excluded and why."""
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


@nodes.command("release")
@click.argument("names", metavar="NODE...", nargs=-1, required=True)
@NO_CONTROLLER
@click.pass_obj
def release(screen: Screen, names: tuple[str, ...], no_controller: bool) -> None:
    """Remove the exclusion of nodes: from the next attempt on they may be used again."""
    with open_store() as store:
        asked = [item for name in dict.fromkeys(names) for item in _request_release(store, name)]
        for kind in sorted({item["kind"] for item in asked if item["where"].reached}):
            wake_controller(screen, kind, no_controller=no_controller)
        await_answers(store, [item for item in asked if item["where"].reached or item["where"].lives], no_controller)
    if screen.json:
        screen.data("nodes.release", [{"node": item["node"], "answer": item["answer"]} for item in asked])
    for item in asked if not screen.json else ():
        screen.say(item["answer"] or f"{item['node']}: asked; the controller has not answered yet")
    for item in asked:
        if not item["answer"]:
            item["where"].require_answer()


def _request_release(store: Any, name: str) -> list[dict[str, Any]]:
    """One request for each cluster that has this node; a run of that cluster carries it. Raises NotFound."""
    now, asked = time.time(), []
    for node in store.nodes():
        run = next((run for run in store.runs() if run.domain == node.cluster), None) if node.name == name else None
        if run is not None:
            ask = store.add_user_request(run.name, "release", {"node": name}, now=now)
            where = locate_run({"run": run.name, "cluster": run.cluster, "scheduler": run.scheduler})
            asked.append({"node": name, "run": run.name, "kind": run.cluster, "ask": ask, "answer": "", "where": where})
    if not asked:
        raise NotFound(f"no run has used a node {name}", hint="`orch nodes ls` lists the nodes that are known")
    return asked
