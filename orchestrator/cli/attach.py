"""`orch attach`: a look into a live job without stopping it."""

from pathlib import Path
from typing import Any

import click

from checkpointing.durable import read_json
from orchestrator.cli.live import Live, await_answer, live
from orchestrator.cli.options import Verb
from orchestrator.cli.render import Screen
from orchestrator.cli.stacks import Thread, read_stacks
from orchestrator.errors import ConfigError, Precondition
from trainer.contract.requests import RequestKind


@click.command(cls=Verb)
@click.argument("run")
@click.option("--stack", is_flag=True, help="Where every thread of the ranks stands.")
@click.option("--rank", type=click.IntRange(0), default=None, help="Of this rank only.")
@click.option("--node", type=click.IntRange(0), default=None, help="Of the ranks of the N-th node, from 0.")
@click.option("--timeout", type=click.FloatRange(min=0), default=60.0, show_default=True, metavar="SECONDS")
@click.pass_obj
def attach(screen: Screen, run: str, stack: bool, rank: int | None, node: int | None, timeout: float) -> None:
    """Look inside a live job without stopping it: where every thread of its ranks stands."""
    if not stack:
        raise ConfigError(
            "attach to what?", where="command line", hint=f"where its ranks stand: orch attach {run} --stack"
        )
    if rank is not None and node is not None:
        raise ConfigError("--rank and --node at once", where="command line", hint="give one of them")
    found = live(run)
    detail = "" if node is None else str(node)
    request = found.ask(RequestKind.STACKS, "orch attach", value=rank, detail=detail)
    answer = await_answer(found, request, timeout)
    folder = found.folder.path / answer
    threads = read_stacks(folder / "stacks")
    if not threads:
        raise Precondition(
            f"{found.run}: no rank told where it stands", where=str(folder),
            hint="a rank that is stopped cannot; what else there is lies in that folder",
        )  # fmt: skip
    _show(screen, found, folder, threads)


def _show(screen: Screen, found: Live, folder: Path, threads: list[Thread]) -> None:
    nodes = _nodes(found)
    if screen.json:
        rows = [{"node": nodes.get(thread.rank), **thread.to_json()} for thread in threads]
        screen.data("attach", {"run": found.run, "folder": str(folder), "threads": rows})
        return
    for thread in threads:
        where = f" on {nodes[thread.rank]}" if thread.rank in nodes else ""
        screen.raw(f"rank {thread.rank}{where}, thread {thread.name} (newest call last)")
        for frame in thread.frames:
            screen.raw(f"  {frame}")
    screen.note(f"kept in {folder}")


def _nodes(found: Live) -> dict[int, str]:
    """The node of each rank, as far as the job tells."""
    try:
        rows: list[dict[str, Any]] = read_json(found.place.ranks)["ranks"]
        return {int(row["rank"]): str(row["node"]) for row in rows}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
