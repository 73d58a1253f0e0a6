"""Whether all ranks of a program have restored the parameters that they saved.

The start-up modules report digests of each rank's parameters at every save, and compare them before the first step.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.agent.processes.background_tasks import RepeatedRead
from trainer.agent.user_command.program_saves import ProgramSave, read_rows, read_saves
from trainer.agent.user_command.progress import run_bounded
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.restore_test import CHECKPOINT_VARIABLE, read_order
from trainer.protocol.run_dir import AttemptDir, RunDir


def find_states(saves: Sequence[ProgramSave], path: str, world: int) -> tuple[str, ...]:
    """Return the digests that each rank reported when it saved the checkpoint at `path`, or () if none is known.

    A rank without a report has "". Ranks of another number have other shards.
    """
    known: dict[int, str] = {}
    for save in saves:
        size, _, digests = save.state.partition(":")
        is_in = save.path == path or save.path.startswith(f"{path}/")  # ranks may save files of their own
        if is_in and size == str(world) and 0 <= save.rank < world:
            known[save.rank] = digests
    return tuple(known.get(rank, "") for rank in range(world)) if any(known.values()) else ()


@dataclass(frozen=True, kw_only=True)
class RestoredRanks:
    """Ranks that have compared their parameters with those of the save from which they continue."""

    agree: tuple[int, ...] = ()
    differ: tuple[int, ...] = ()

    def describe(self, name: str) -> str:
        """Return a sentence about the checkpoint with this name."""
        if not self.differ:
            ranks = f"all {len(self.agree)} ranks that saved" if len(self.agree) > 1 else "the rank that saved"
            verb = "have" if len(self.agree) > 1 else "has"
            return f"{ranks} {verb} the parameters of {name}, bit for bit"
        shown = ", ".join(map(str, self.differ[:8])) + (", ..." if len(self.differ) > 8 else "")
        ranks = f"rank{'s' if len(self.differ) > 1 else ''} {shown}"
        many = len(self.agree) > 1
        others = f"; {len(self.agree)} other rank{'s agree' if many else ' agrees'}" if self.agree else ""
        return f"the parameters of {ranks} differ from those saved in {name}{others}"


def read_restored(attempt: AttemptDir, generation: int) -> RestoredRanks:
    """Return what the ranks of a generation have reported."""
    agrees: dict[int, bool] = {}
    for row in read_rows(attempt):
        if row.get("generation") == generation and row.get("restored"):
            rank = int(row["rank"])
            agrees[rank] = agrees.get(rank, True) and bool(row["agrees"])
    agree = tuple(sorted(rank for rank, agreed in agrees.items() if agreed))
    return RestoredRanks(agree=agree, differ=tuple(sorted(set(agrees) - set(agree))))


def compare_losses(run: RunDir, attempt: AttemptDir, path: str) -> str:
    """Return how the losses after a restore test's start compare with those after the run's save at `path`.

    Return "" if no step has both.
    """
    before, now = {}, _losses(read_rows(attempt), path)
    for earlier in run.all_attempts():
        before.update(_losses(read_rows(earlier), path))
    both = sorted(before.keys() & now.keys())
    other = [step for step in both if before[step] != now[step]]
    if other:
        return f"; its loss of step {other[0]} is {now[other[0]]:.9g}, and was {before[other[0]]:.9g} in the run"
    if len(both) > 1:
        return f"; its losses of {len(both)} steps are as in the run"
    return f"; its loss of step {both[0]} is as in the run" if both else ""


def _losses(rows: Iterable[dict[str, Any]], path: str) -> dict[int, float]:
    """Return losses after the save at `path`, keyed by step."""
    found = {}
    for row in rows:
        after = str(row.get("after", ""))
        if after == path or after.startswith(f"{path}/"):
            found[int(row["of_step"])] = float(row["loss"])
    return found


def _read_source(run: RunDir) -> list[ProgramSave]:
    """Return the saves of a run or, for a restore test, those of the run that it tests."""
    order = read_order(run)
    return read_saves((run if order is None else RunDir(Path(order.run_dir))).all_attempts())


_LOOK_SECONDS, _LATE_SECONDS = 2.0, 30.0
"""Seconds between two looks at the reports, and from the first one to the statement if ranks are missing."""


class RestoreWatch:
    """States once per generation whether its ranks have restored what they saved."""

    def __init__(self, run: RunDir, attempt: AttemptDir, config: JobConfig, events: EventLog) -> None:
        self._run, self._config, self._events = run, config, events
        self._generation, self._path, self._since = 0, "", 0.0
        self.states: tuple[str, ...] = ()
        """Digests that each rank should have before its first step; (): unknown."""
        self._reading = RepeatedRead(lambda: read_restored(attempt, self._generation), attempt.outcomes)

    async def start_generation(self, generation: int, path: str) -> None:
        """Find what the ranks saved in the checkpoint at `path` ("": none), from which a generation starts."""
        self._path = path or self._config.env.get(CHECKPOINT_VARIABLE, "")
        self._generation, self._since, self.states = generation, 0.0, ()
        self._reading.discard()
        if self._path:
            saves = await run_bounded(partial(_read_source, self._run)) or []
            self.states = find_states(saves, self._path, self._config.cluster.world_size)

    def check(self) -> None:
        if not self.states or (read := self._reading.poll(_LOOK_SECONDS)) is None or read.exception() is not None:
            return
        found, now = read.result(), time.monotonic()
        known = len(found.agree) + len(found.differ)
        self._since = self._since or (now if known else 0.0)
        if known and (known == sum(map(bool, self.states)) or now - self._since > _LATE_SECONDS):
            self._events.write(
                EventKind.PROGRAM_RESTORED, path=self._path, agree=list(found.agree), differ=list(found.differ),
                reason=found.describe(Path(self._path).name),
            )  # fmt: skip
            self.states = ()
