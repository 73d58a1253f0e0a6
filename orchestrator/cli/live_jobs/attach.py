"""`orch attach`: the stacks of a live job's ranks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click

from checkpointing.storage.durable import read_json
from orchestrator.cli.live_jobs.live_attempt import (
    LiveAttempt,
    await_answer,
    find_live_attempt,
    require_rank_and_node,
)
from orchestrator.cli.runs.run_reader import PROCESS_STATES, newest_ranks
from orchestrator.cli.terminal.argument_types import timeout_option
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError, Precondition
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.rank_readings import RankReading
from trainer.protocol.requests import RequestKind

_RANK = re.compile(r"rank-(\d+)(\.py-spy)?\.txt")
_THREAD = re.compile(r"^(Current thread|Thread) (\S+)(.*?)(?: \(most recent call first\))?:?\s*(\".*\")?$")
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+|\?\?\?) in (.*)$')
_OUTSIDE = re.compile(r"^\s+(.+?) \((.+):(\d+)\)$")
_MOST_NAMED = 3
"""Maximum number of ranks that an error names."""
ATTACH_JSON = """
{run, folder, threads: [{node, rank, thread, frames: [{file, line, function}]}], missing: [{rank, node, why}]}
"""


class Frame(NamedTuple):
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Thread:
    """A thread of a rank. In `frames` the newest call is last."""

    rank: int
    name: str
    frames: list[Frame] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "thread": self.name, "frames": [frame._asdict() for frame in self.frames]}


def read_stacks(folder: Path) -> list[Thread]:
    """Return all threads of all ranks, sorted by rank. py-spy's file is read only if the rank did not write its own."""
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("rank-*.txt")):
        match = _RANK.fullmatch(path.name)
        if match is not None and (match[2] is None or int(match[1]) not in files):
            files[int(match[1])] = path
    return [thread for rank, path in sorted(files.items()) for thread in parse(rank, path.read_text(errors="replace"))]


def parse(rank: int, text: str) -> list[Thread]:
    """Return the threads found in faulthandler or py-spy output."""
    threads: list[Thread] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            words = [head[2], head[3].strip().rstrip(":"), head[4], "(current)" if head[1] == "Current thread" else ""]
            threads.append(Thread(rank, " ".join(filter(None, words))))
        elif threads and (frame := _frame(line)) is not None:
            threads[-1].frames.insert(0, frame)
    return threads


def _frame(line: str) -> Frame | None:
    if ours := _FRAME.match(line):
        return Frame(ours[1], int(ours[2]) if ours[2].isdigit() else 0, ours[3])
    outside = _OUTSIDE.match(line)
    return Frame(outside[2], int(outside[3]), outside[1]) if outside is not None else None


@click.command(cls=Verb, json_data=ATTACH_JSON)
@click.argument("run")
@click.option("--stack", is_flag=True, help="Print the stack of every thread of the ranks. Required.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only this rank.")
@click.option("--node", type=click.IntRange(0), metavar="N", help="Only the ranks of the N-th node, counting from 0.")
@timeout_option(60.0)
@click.pass_obj
def attach(screen: Screen, run: str, stack: bool, rank: int | None, node: int | None, timeout: float) -> None:
    """Print the stacks of a live job's ranks without stopping them.

    It prints every thread, newest call last. With py-spy installed it works even while a thread holds the GIL. It
    names the ranks that did not answer, with the reason if their agent has one. The stacks are kept in the
    attempt's `evidence` folder.
    """
    found = find_live_attempt(run)  # first, so that the hint below names a command that works
    if not stack:
        hint = f"to see the stacks of its ranks: orch attach {run} --stack"
        raise ConfigError("--stack is missing", where="command line", hint=hint)
    if rank is not None and node is not None:
        raise ConfigError("--rank and --node are mutually exclusive", where="command line", hint="pass one of them")
    require_rank_and_node(found.config.cluster, rank, node)
    detail = "" if node is None else str(node)
    request = found.send_request(RequestKind.STACKS, "orch attach", value=rank, detail=detail)
    screen.if_interrupted = lambda: f"interrupted: {found.run} continues; the stacks are still written to its evidence"
    folder = found.folder.path / await_answer(found, request, timeout)
    threads = read_stacks(folder / "stacks")
    readings, answered = _read_ranks(found, folder), {thread.rank for thread in threads}
    missing = [
        {"rank": one, "node": _node(readings, one), "why": _state(readings.get(one))}
        for one in _selected_ranks(found.config.cluster, rank, node)
        if one not in answered
    ]
    if not threads:
        raise Precondition(
            f"{found.run}: no rank reported its stack: {'; '.join(map(_describe_missing, missing[:_MOST_NAMED]))}",
            where=str(folder), hint="a stopped rank cannot report it; other evidence is in that folder",
        )  # fmt: skip
    if screen.json:
        rows = [{"node": _node(readings, thread.rank), **thread.to_json()} for thread in threads]
        screen.data("attach", {"run": found.run, "folder": str(folder), "threads": rows, "missing": missing})
        return
    for thread in threads:
        where = _node_suffix(_node(readings, thread.rank))
        screen.raw(f"rank {thread.rank}{where}, thread {thread.name} (newest call last)")
        for frame in thread.frames:
            screen.raw(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
    for row in missing:
        screen.raw(_describe_missing(row))
    screen.note(f"kept in {folder}")


def _selected_ranks(cluster: ClusterShape, rank: int | None, node: int | None) -> range:
    if rank is not None:
        return range(rank, rank + 1)
    first = 0 if node is None else node * cluster.ranks_per_node
    return range(first, cluster.world_size if node is None else first + cluster.ranks_per_node)


def _describe_missing(row: Mapping[str, Any]) -> str:
    why = f": {row['why']}" if row["why"] else ""
    return f"rank {row['rank']}{_node_suffix(row['node'])} did not answer{why}"


def _node_suffix(node: str | None) -> str:
    return f" on {node}" if node else ""


def _node(readings: Mapping[int, RankReading], rank: int) -> str | None:
    return readings[rank].node if rank in readings else None


def _state(reading: RankReading | None) -> str:
    state = PROCESS_STATES.get(reading.state) if reading is not None else None
    return "it has ended" if reading is not None and reading.ended else f"its process is {state}" if state else ""


def _read_ranks(found: LiveAttempt, folder: Path) -> dict[int, RankReading]:
    """Return each rank's reading from its agent's answer, or else from the job's last report."""
    newest = newest_ranks(found.attempt_dir)
    readings = {one.rank: one for one in newest.ranks} if newest is not None else {}
    for path in sorted(folder.glob("node-*/cells.json")):
        try:
            cells = read_json(path)
        except (OSError, ValueError):
            continue
        for cell in cells.values() if isinstance(cells, dict) else ():
            one = RankReading.from_json(cell.get("seen")) if isinstance(cell, dict) else None
            if one is not None:
                readings[one.rank] = one
    return readings
