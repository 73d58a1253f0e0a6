"""`orch nodes`: the nodes that runs have used, and excluded nodes."""

import socket
import time
from typing import Any

import click

from checkpointing.storage.trusted_path import own_name
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import locate_run
from orchestrator.cli.runs.cancel_resume import NO_CONTROLLER, PendingRequest, serve_requests
from orchestrator.cli.terminal.argument_types import Seconds
from orchestrator.cli.terminal.command_classes import Noun
from orchestrator.cli.terminal.render import Column, Screen, count, iso, span
from orchestrator.errors import NotFound, Precondition, SlurmUnreachable
from orchestrator.registry.records import EXCLUDE, RELEASE, UNTIL_RELEASED

_LONGEST_WHY = 200


@click.group(cls=Noun)
def nodes() -> None:
    """List the nodes that runs have used, exclude nodes from jobs, and release them."""


@nodes.command("ls")
@click.pass_obj
def ls(screen: Screen) -> None:
    """List every node: attempts, failures, until when it is excluded, by whom and why.

    FAILURES counts failures that the node may have caused. LAST SEEN is `never` if no attempt ran on it. BY is `person`
    or `orch`. docs/watching.md gives the rules by which orch excludes nodes.
    """
    now = time.time()
    with open_store(readonly=True) as store:
        rows = [_row(node, now) for node in store.nodes()]
    people = screen.terminal
    columns = [
        Column("NODE", "node"),
        Column("CLUSTER", "cluster"),
        Column("ATTEMPTS", "attempts", count, right=True),
        Column("FAILURES", "failures", count, right=True),
        Column("LAST SEEN", "_ago") if people else Column("LAST_SEEN", "last_seen"),
        Column("EXCLUDED FOR", "_left") if people else Column("EXCLUDED_UNTIL", "excluded_until"),
        *([Column("BY", "excluded_by")] if people else []),
        Column("WHY", "reason"),
        *([] if people else [Column("EXCLUDED_BY", "excluded_by")]),
    ]
    screen.listing("nodes.ls", columns, rows, empty="no attempt has run on any node yet")


def _row(node: Any, now: float) -> dict[str, Any]:
    by = node.exclusion_source(now)
    used = node.attempts or node.failures  # otherwise it was only excluded
    left = node.excluded_until - now if by else None
    return {
        "node": node.name, "cluster": node.cluster, "attempts": node.attempts, "failures": node.failures,
        "first_seen": iso(node.first_seen) if used else None, "last_seen": iso(node.last_seen) if used else None,
        "excluded_until": iso(node.excluded_until) if by else None, "reason": node.reason, "excluded_by": by or None,
        "_ago": f"{span(now - node.last_seen)} ago" if used else "never",
        "_left": "until released" if left is not None and left > UNTIL_RELEASED / 2 else span(left),
    }  # fmt: skip


@nodes.command("exclude", json_data="list of {node, answer}")
@click.argument("names", metavar="NODE...", nargs=-1, required=True)
@click.option(
    "--for", "seconds", type=Seconds(min=0, min_open=True), metavar="TIME",
    help="For this time (30m, 2h, 1d); default: until `orch nodes release`.",
)  # fmt: skip
@click.option("--why", metavar="TEXT", default="", help="Reason, shown by `orch nodes ls`.")
@NO_CONTROLLER
@click.pass_obj
def exclude(screen: Screen, names: tuple[str, ...], seconds: float | None, why: str, no_controller: bool) -> int:
    """Keep jobs away from nodes: queued jobs, and jobs of any run that are submitted from now on.

    NODE is a name or a host list (gpu[003,017]) of at most 100000 nodes. Running jobs keep their nodes. orch obeys even
    if too few nodes remain for a job; Slurm then gives the reason. The exit code is 3 for a node that neither a run nor
    Slurm has, 4 if nothing has been submitted to its cluster yet or the node is simulated.
    """
    until = time.time() + seconds if seconds else UNTIL_RELEASED
    by = f"{own_name()}@{socket.gethostname()}"
    args = {"until": until, "why": f"{by}: {' '.join(why.split())[:_LONGEST_WHY]}" if why.split() else by}
    return _request_each(screen, EXCLUDE, _expand_names(names), args, no_controller)


def _expand_names(names: tuple[str, ...]) -> list[str]:
    from orchestrator.scheduler.slurm.command_output import expand_nodes
    from orchestrator.scheduler.slurm.sbatch_values import check_nodes  # as for cluster.exclude

    return list(dict.fromkeys(expand_nodes(check_nodes("NODE", names))))


@nodes.command("release", json_data="list of {node, answer}")
@click.argument("names", metavar="NODE...", nargs=-1, required=True)
@NO_CONTROLLER
@click.pass_obj
def release(screen: Screen, names: tuple[str, ...], no_controller: bool) -> int:
    """End the exclusion of nodes, so that they may be used again from the next attempt on.

    The failures behind the exclusion no longer count. The exit code is 4 if no controller serves the cluster from
    here.
    """
    return _request_each(screen, RELEASE, _expand_names(names), {}, no_controller)


def _request_each(screen: Screen, verb: str, names: list[str], args: dict[str, Any], no_controller: bool) -> int:
    with open_store(create=True) as store:
        clusters = {name: _clusters(store, verb, name) for name in names}  # look all of them up before any request
        requests = [item for name in names for item in _request_per_cluster(store, verb, name, clusters[name], args)]
        unanswered = serve_requests(screen, store, requests, no_controller=no_controller)
    text = "\n".join(item.answer or f"{item.node}: requested; the controller has not answered yet" for item in requests)
    screen.answer(f"nodes.{verb}", [{"node": item.node, "answer": item.answer} for item in requests], text)
    for item in requests:
        if not item.answer:
            item.where.require_answer()
    return SlurmUnreachable.exit_code if unanswered else 0


def _clusters(store: Any, verb: str, name: str) -> list[str]:
    """Return the clusters that have this node, from the registry or from Slurm. Raises NotFound, Precondition."""
    from orchestrator.scheduler.scheduler_instance import is_one_host

    found = [node.cluster for node in store.nodes() if node.name == name]
    if verb == EXCLUDE and found and all(map(is_one_host, found)):
        raise Precondition(
            f"{name} is a simulated node: all simulated nodes run on this machine", where=found[0],
            hint="nodes of a Slurm cluster can be excluded",
        )  # fmt: skip
    if not found and verb == RELEASE:
        raise NotFound(f"no run has used node {name}", hint="`orch nodes ls` lists the known nodes")
    return found or [_find_cluster(name)]


def _find_cluster(name: str) -> str:
    """Return which reachable cluster has this node, which no run has used yet. Raises NotFound."""
    from orchestrator.scheduler.available_schedulers import FACTORIES, kinds, make_instance

    reached = False
    for kind in kinds():
        has_node = FACTORIES[kind].has_node
        if has_node is not None and has_node(name):
            return make_instance(kind)()
        reached |= has_node is not None and bool(make_instance(kind)())
    more = ", `sinfo -N` those of the cluster" if reached else ""
    raise NotFound(
        f"no run has used node {name}, and no Slurm here has it", hint=f"`orch nodes ls` lists those of runs{more}"
    )


def _request_per_cluster(
    store: Any, verb: str, name: str, clusters: list[str], args: dict[str, Any]
) -> list[PendingRequest]:  # fmt: skip
    """Record one request per cluster with this node, under one of its runs. Raises Precondition if none has a run."""
    now, requests = time.time(), []
    for cluster in clusters:
        run = next((run for run in store.runs() if run.domain == cluster), None)
        if run is None:
            continue
        request_id = store.add_user_request(run.name, verb, {"node": name, **args}, now=now)
        where = locate_run(run.name, run.cluster, run.scheduler)
        requests.append(PendingRequest(run=run.name, kind=run.cluster, where=where, id=request_id, node=name))
    if not requests:
        raise Precondition(
            f"nothing has been submitted to {', '.join(clusters)} from here yet",
            where=name, hint=f"cluster.exclude={name} in a configuration keeps its run away from that node",
        )  # fmt: skip
    return requests
