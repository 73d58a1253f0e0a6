"""`orch logs`: output of ranks, agents and the controller, for live and ended runs."""

import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from orchestrator.cli.access.run_folder import existing_folder
from orchestrator.cli.live_jobs.first_error import controller_failure, first_error
from orchestrator.cli.live_jobs.live_attempt import require_rank_and_node
from orchestrator.cli.runs.events import detach_message, end_follow
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, plain
from orchestrator.errors import ConfigError, NotFound
from orchestrator.home import controller_log
from orchestrator.run_view import find_run
from trainer.protocol.config import load
from trainer.protocol.logs.log_rotation import LogReader, log_files, read_files, read_tail
from trainer.protocol.run_dir import AttemptDir, RunDir

POLL = 0.5
_BLOCK = 65536
_RANK_LOG = re.compile(r"rank-(\d+)\.log(?:\.\d+)?")
"""Pattern that also matches rotated files, because only those remain if an agent dies during a rotation."""


@dataclass(frozen=True, kw_only=True)
class LogSelection:
    """Selection of logs. At most one field after `attempt` is set; rank 0 is the default."""

    attempt: int | None = None
    rank: str | None = None
    node: int | None = None
    controller: bool = False


@dataclass(frozen=True)
class LogSource:
    """A log file, and the prefix for its lines if several logs are printed."""

    label: str
    path: Path


@click.command(cls=Verb)
@click.argument("run")
@click.option("--rank", metavar="R|all|first-error", help="One rank's log, all with a prefix, or the root failure.")
@click.option("--node", type=click.IntRange(0), metavar="N", help="The agent's log of this node (0 is the first).")
@click.option(
    "--attempt", type=click.IntRange(1), metavar="N",
    help="Read this attempt; default: the newest (for first-error: the newest that failed).",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Continue across generations and attempts until the run ends.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Print only the last N lines.")
@click.option("--controller", is_flag=True, help="Print what the controller wrote about this run.")
@click.option("--path", "only_path", is_flag=True, help="Print file names instead of lines.")
@click.pass_obj
def logs(
    screen: Screen, run: str, rank: str | None, node: int | None, attempt: int | None, follow: bool,
    tail: int | None, controller: bool, only_path: bool,
) -> int:  # fmt: skip
    """Print the logs of ranks, agents and the controller; without options, the log of rank 0.

    That log gets a line with loss, learning rate, speed and ETA every `logs.every`. Before any rank has started, the
    agents' logs are printed, or else the scheduler's output.

    `--rank first-error` finds the root failure that ended the attempt, or the earliest failure in an attempt that did
    not fail. It prints the rank, the time, and the traceback or the lines around the first error; secondary failures
    are skipped.

    The command reads across rotated files (`logs.max_mib`, `logs.keep`), and removes escape sequences and control
    characters. The exit code with -f is 0, 8 if the run failed or is held, or 10 if it was cancelled.
    """
    _check(rank, node, controller, follow and screen.json)
    view = find_run(run)
    place = RunDir(Path(view.run_dir)) if controller else existing_folder(view.run, view.run_dir)
    wanted = LogSelection(attempt=attempt, rank=rank, node=node, controller=controller)
    if rank == "first-error":
        return _first_error(screen, place, view.run, attempt, only_path)
    sources = _sources(place, wanted, view.run)
    if not sources:
        _require_existence(place, wanted)
    if not sources and (only_path or not follow):
        where = str(controller_log().parent if controller else place.path)
        raise NotFound("there is no such log (yet)", where=where, hint=f"orch events {place.name}")
    if only_path:
        answer = [{"source": source.label, "path": str(source.path)} for source in sources]
        screen.answer("logs.path", answer, "\n".join(str(source.path) for source in sources))
        return 0
    if follow:
        return _follow(screen, place, wanted, view.run, 20 if tail is None else tail)
    _dump(screen, sources, tail, view.run if controller else "")
    return 0


def _check(rank: str | None, node: int | None, controller: bool, follow_json: bool) -> None:
    where = "command line: orch logs"
    if rank is not None and not rank.isdigit() and rank not in ("all", "first-error"):
        raise ConfigError(f"`{rank}` is not a rank", where="command line: --rank", hint="a number, all or first-error")
    if sum((rank is not None, node is not None, controller)) > 1:
        what = "--rank, --node and --controller are mutually exclusive"
        raise ConfigError(what, where=where, hint="pass only one of them")
    if follow_json:
        raise ConfigError("-f never ends, but --json prints one object", where=where, hint="omit one of them")


def _require_existence(place: RunDir, wanted: LogSelection) -> None:
    """Raise ConfigError for a rank or node that the job does not have, because its log will never appear."""
    attempts = [item.number for item in place.all_attempts() if wanted.attempt in (None, item.number)]
    rank = int(wanted.rank) if wanted.rank is not None and wanted.rank.isdigit() else None
    with suppress(OSError, ValueError, TypeError, AttributeError):  # without a configuration the range is unknown
        require_rank_and_node(load(place, attempts[-1] if attempts else 0).cluster, rank, wanted.node)


def _first_error(screen: Screen, place: RunDir, run: str, attempt: int | None, only_path: bool) -> int:
    found = first_error(place, attempt) or controller_failure(place, run, attempt)
    if found is None:
        what = f"no failure is on record for {run}" + (f", attempt {attempt}" if attempt else "")
        raise NotFound(what, where=str(place.path), hint=f"orch events {run}")
    if screen.json:
        screen.data("logs.first-error", found.to_json())
    elif only_path:
        screen.say(str(found.path))
    else:
        screen.say(found.headline)
        screen.raw(found.text)
        screen.note(f"from {found.path}")
    return 0


def _sources(place: RunDir, wanted: LogSelection, run: str) -> list[LogSource]:
    """Return the selected logs that exist, from the newest attempt unless an attempt is given."""
    if wanted.controller:
        path = controller_log()
        return [LogSource("controller", path)] if path.exists() else []
    attempts = place.all_attempts()
    if wanted.attempt is not None:
        attempts = [item for item in attempts if item.number == wanted.attempt]
        if not attempts:
            raise NotFound(f"{run} has no attempt {wanted.attempt}", where=str(place.path), hint=f"orch show {run}")
    return _of_attempt(attempts[-1], wanted) if attempts else []


def _of_attempt(attempt: AttemptDir, wanted: LogSelection) -> list[LogSource]:
    if wanted.node is not None:
        return _existing([LogSource(f"node {wanted.node}", attempt.agent_log(wanted.node))])
    if wanted.rank == "all":
        paths = (path for path in attempt.logs.glob("rank-*") if not path.is_symlink())
        ranks = {int(match[1]) for path in paths if (match := _RANK_LOG.fullmatch(path.name))}
        return [LogSource(f"rank {rank}", attempt.rank_log(rank)) for rank in sorted(ranks)]
    rank = int(wanted.rank or 0)
    found = _existing([LogSource(f"rank {rank}", attempt.output_log(rank))])
    if found or wanted.rank is not None:
        return found
    # No rank has started yet: use the agents' logs, or else the scheduler's output files.
    agents = [LogSource(path.stem, path) for path in sorted(attempt.logs.glob("agent-*.log"))]
    if agents:
        return agents
    caught = [path for pattern in ("*.out", "*.err") for path in sorted(attempt.submission.glob(pattern))]
    return [LogSource(path.name, path) for path in caught]


def _existing(sources: list[LogSource]) -> list[LogSource]:
    return [source for source in sources if log_files(source.path)]


def _dump(screen: Screen, sources: list[LogSource], tail: int | None, only: str) -> None:
    lines = ((source.label, line) for source in sources for line in _lines(source.path, tail, only))
    if screen.json:
        rows = [{"source": label, "line": plain(line)} for label, line in lines]
        screen.data("logs", {"paths": [str(source.path) for source in sources], "lines": rows})
        return
    for label, line in lines:
        screen.raw(f"{label} | {line}" if len(sources) > 1 else line)


def _lines(path: Path, tail: int | None, only: str) -> Iterator[str]:
    whole = tail is None or bool(only)
    chosen = (line for line in (_every_line(path) if whole else _last_lines(path, tail or 0)) if only in line)
    return chosen if tail is None else iter(deque(chosen, maxlen=tail))


def _every_line(path: Path) -> Iterator[str]:
    """Yield lines across all files of the log, one file in memory at a time. A line may continue in the next file."""
    rest = b""
    for content in read_files(path):
        *lines, rest = (rest + content).split(b"\n")
        yield from (_text(line) for line in lines)
    if rest:
        yield _text(rest)


def _last_lines(path: Path, count: int) -> list[str]:
    wanted = _BLOCK
    found = read_tail(path, wanted)
    while found.count(b"\n") <= count and len(found) >= wanted:
        wanted *= 4
        found = read_tail(path, wanted)
    lines = found.removesuffix(b"\n").split(b"\n") if found else []
    return [_text(line) for line in lines[-count:]] if count else []


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")


class _Tail:
    """Reader of the complete new lines of a growing log."""

    def __init__(self, source: LogSource, lines: int | None) -> None:
        """Start `lines` lines before the end; with None, at the beginning."""
        self.source, self._rest = source, b""
        self._reader = LogReader(source.path, lines)

    def read(self) -> list[str]:
        block = self._rest + self._reader.read()
        whole, mark, self._rest = block.rpartition(b"\n")
        return (whole + mark).decode(errors="replace").splitlines()

    def rest(self) -> list[str]:
        """Return the incomplete last line of a log that no longer grows."""
        return [_text(self._rest)] if self._rest else []

    def close(self) -> None:
        self._reader.close()


def _follow(screen: Screen, place: RunDir, wanted: LogSelection, run: str, lines: int) -> int:
    """Print appended lines, across attempts, until the run has ended and no more arrive. Returns the exit code."""
    tails: dict[Path, _Tail] = {}
    screen.if_interrupted = lambda: detach_message(run)
    try:
        while True:
            view = find_run(run)
            # The first pass shows the ends of existing files; files that appear later are shown in full.
            begin = None if tails else lines
            for source in _sources(place, wanted, run):
                if source.path not in tails:
                    with suppress(FileNotFoundError):  # in the middle of a rotation; the next pass finds the file
                        tails[source.path] = _Tail(source, begin)
            fresh = [(tail, line) for tail in tails.values() for line in tail.read()]
            dry = not fresh and view.is_over
            fresh += [(tail, line) for tail in tails.values() for line in tail.rest()] if dry else []
            several = len({tail.source.label for tail in tails.values()}) > 1
            for tail, line in fresh:
                if not wanted.controller or run in line:
                    screen.raw(f"{tail.source.label} | {line}" if several else line)
            screen.flush()
            if dry:
                return end_follow(screen, view)
            time.sleep(POLL)
    finally:
        for tail in tails.values():
            tail.close()
