"""`orch top`: step, speed and loss of a live run, and the phase of every rank."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.access.run_folder import existing_folder
from orchestrator.cli.runs.run_reader import PROCESS_STATES, EventFeed, StepLine, newest_heartbeat, newest_ranks
from orchestrator.cli.runs.status import describe_start, warn_without_controller
from orchestrator.cli.runs.timeline import EventDescriber
from orchestrator.cli.runs.training_figures import describe_shares, loss_trend, step_seconds, time_shares
from orchestrator.cli.terminal.argument_types import Seconds
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, decimal, iso, one_line, progress, span
from orchestrator.home import registry_path
from orchestrator.registry.fast_queries import saved_steps
from orchestrator.run_view import RunView, find_run
from trainer.protocol.events import Event, EventKind
from trainer.protocol.heartbeat import AttemptStage, Heartbeat
from trainer.protocol.rank_readings import RankReading
from trainer.protocol.run_dir import RunDir

MOST = 64
"""Maximum number of ranks that have one line each. If there are more, only the `WORST` are shown."""
WORST = 10
_ABOVE = 3
"""Lines above the first rank: an empty one, the summary and the column titles."""
EVENTS = 5
STILL = 2.0
"""Seconds without a progress cell update after which a rank is shown as still."""
TOP_JSON = """
{run, state, step, total_steps, loss, tokens_per_s, attempt, generation, phase, silent_s, last_checkpoint, saved_step,
world, ranks: [{rank, node, step, phase, age, state, ratio, ended}], events: [{time, text}], step_seconds, eta_s,
expected_start: {at, age_s, source} | null, loss_change, loss_steps}; for a command, step and age of a rank are null
"""


@dataclass(frozen=True, kw_only=True)
class LiveReading:
    """A run's view, extended with data from the files of its newest attempt."""

    view: RunView
    beat: Heartbeat | None
    steps: Sequence[StepLine]  # the newest ones
    ranks: Sequence[RankReading]
    world: int
    events: list[tuple[float, str]]
    judged: frozenset[int]  # steps of checkpoints whose trust is in the registry
    saved: tuple[int, float] | None  # step and time of the newest commit in the job's events

    @property
    def latest(self) -> StepLine:
        """The newest step; empty before the first one."""
        return self.steps[-1] if self.steps else {}

    @property
    def last_checkpoint(self) -> dict[str, Any] | None:
        """Newest checkpoint. The job's own files have it before the registry does."""
        known = self.view.last_checkpoint
        step, age = self.beat.saved_step if self.beat is not None else 0, None
        if self.saved is not None and self.saved[0] >= step:
            step, age = self.saved[0], self._age(self.saved[1])
        # If the registry has the step, but not as its newest checkpoint, the checkpoint may be CORRUPT.
        if step in self.judged or step <= (known["step"] if known is not None else 0):
            return known
        return {"step": step, "trust": "COMMITTED", "age_s": age}

    @property
    def step(self) -> int:
        beat = self.beat.step if self.beat is not None else 0
        return max(int(self.latest.get("step", 0)), beat or 0, self.view.step)

    @property
    def loss(self) -> Any:
        return self.latest.get("loss", self.view.loss)

    @property
    def silent_s(self) -> float | None:
        """Seconds since the newest heartbeat."""
        return self._age(self.beat.time) if self.beat is not None else None

    def _age(self, moment: float) -> float:
        return round(max(0.0, self.view.now - moment), 3)

    def to_json(self) -> dict[str, Any]:
        view, beat = self.view, self.beat
        change, steps = loss_trend(self.steps)
        return {
            "run": view.run, "state": view.state, "step": self.step, "total_steps": view.total_steps,
            "loss": self.loss, "tokens_per_s": self.latest.get("tokens_per_s"),
            **{key: beat and getattr(beat, key) for key in ("attempt", "generation", "phase", "saved_step")},
            "silent_s": self.silent_s, "last_checkpoint": self.last_checkpoint, "world": self.world,
            "ranks": [asdict(rank) for rank in self.ranks],
            "events": [{"time": iso(when), "text": text} for when, text in self.events],
            "step_seconds": step_seconds(self.steps), "eta_s": view.eta_s, "expected_start": view.expected_start,
            "loss_change": change, "loss_steps": steps,
        }  # fmt: skip


class LiveRunReader:
    """Reads a run repeatedly. Each read of its events continues where the last read stopped."""

    def __init__(self, run: str, run_dir: Path) -> None:
        self._run, self._folder, self._feed = run, RunDir(run_dir), EventFeed(run_dir, recent_only=True)
        self._describer = EventDescriber()
        self._lines: deque[tuple[float, str]] = deque(maxlen=EVENTS)
        self._saves: dict[str, tuple[int, float]] = {}  # step and time, keyed by name

    def read(self) -> LiveReading:
        for event in self._feed.poll():
            self._note_save(event)
            if (text := self._describer.describe(event)) is not None:
                self._lines.append((event.time, text))
        attempts = self._folder.all_attempts()
        beat = newest_heartbeat(attempts[-1]) if attempts else None
        found = newest_ranks(attempts[-1]) if beat is not None else None
        if beat is None or found is None or found.generation != beat.generation:  # from another generation
            found = None
        view = find_run(self._run)
        return LiveReading(
            view=view, beat=beat, steps=self._feed.recent,
            ranks=found.ranks if found is not None and not view.is_over else (),  # stale once the run has ended
            world=found.world if found is not None else 0, events=list(self._lines),
            judged=frozenset(step for step, _ in saved_steps(registry_path(), self._run)),
            saved=max(self._saves.values(), default=None),
        )  # fmt: skip

    def _note_save(self, event: Event) -> None:
        name = str(event.data.get("name"))
        if event.kind in (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_SEEN) and "step" in event.data:
            self._saves[name] = int(event.data["step"]), event.time
        elif event.kind in (EventKind.CHECKPOINT_SET_ASIDE, EventKind.CHECKPOINT_DELETED):
            self._saves.pop(name, None)


@click.command(cls=Verb, json_data=TOP_JSON)
@click.argument("run")
@click.option("--once", is_flag=True, help="Print once and exit (the default without a terminal).")
@click.option(
    "--every", type=Seconds(min=0.2), default=1.0, show_default=True, metavar="SECONDS",
    help="Time between updates.",
)  # fmt: skip
@click.pass_obj
def top(screen: Screen, run: str, once: bool, every: float) -> None:
    """Show a live run: step, tokens/s, loss, last checkpoint, and where every rank is. Ctrl-C ends the display.

    For every rank it prints the phase, the time since it last moved, its own work relative to its peers', and
    whether its process is stopped. With more than 64 ranks, or more than fit, it shows those that need attention.
    ETA is the time left at the speed of the newest generation.

    It reads only files of the newest attempt, so it may show a checkpoint before the registry has it.
    docs/watching.md explains the phases.
    """
    view = find_run(run)
    reader = LiveRunReader(view.run, existing_folder(view.run, view.run_dir).path)
    warn_without_controller(screen, [view])
    if screen.json:
        screen.data("top", reader.read().to_json())
        return
    if once or not screen.terminal:
        print_reading(screen, reader.read())
        return
    screen.if_interrupted = lambda: ""  # users normally leave with Ctrl-C
    with screen.live_page() as draw:
        while True:
            reading = reader.read()
            draw(partial(print_reading, screen, reading))
            if reading.view.is_over:
                return
            time.sleep(every)


def print_reading(screen: Screen, reading: LiveReading) -> None:
    """Print the lines about the run, its events and its ranks; a live display omits those that do not fit."""
    for line in _head(screen, reading):
        screen.say(line)
    # These lines come before the ranks, because a live display is cut at the bottom of the terminal.
    lines = [f"{screen.when(when)}  {one_line(text)}" for when, text in reading.events]
    if lines:
        screen.say("")
    if (space := screen.remaining_space) is not None:  # each event but the newest has one line
        lines = [*(line if len(line) <= space[1] else line[: space[1] - 1] + "…" for line in lines[:-1]), *lines[-1:]]
    for line in lines:
        screen.say(line, hang=len(screen.when(0.0)) + 2)
    space = screen.remaining_space
    rows = select_ranks(reading, space[0] if space is not None else None)
    if rows:
        screen.say("" if len(rows) == reading.world else f"\n{len(rows)} of {reading.world} ranks that need attention")
        screen.table(RANKS, [_cells(one) for one in rows], aligned=True)


def select_ranks(reading: LiveReading, lines: int | None) -> Sequence[RankReading]:
    """Return the ranks to show: all if they fit into `lines` (None: no limit), else the worst."""
    rows = reading.ranks if reading.world <= MOST else worst_ranks(reading.ranks)
    if lines is None or len(rows) + _ABOVE <= lines:
        return rows
    return worst_ranks(rows, max(1, lines - _ABOVE))


def worst_ranks(ranks: Sequence[RankReading], most: int = WORST) -> Sequence[RankReading]:
    """Return the ranks that most need attention: stopped, slow, furthest behind, or longest without progress."""

    def badness(one: RankReading) -> tuple[bool, float, int, float]:
        return one.state in PROCESS_STATES and not one.ended, one.ratio or 0.0, -(one.step or 0), one.age or 0.0

    return sorted(sorted(ranks, key=badness, reverse=True)[:most], key=lambda one: one.rank)


def _head(screen: Screen, reading: LiveReading) -> list[str]:
    view, beat, latest = reading.view, reading.beat, reading.latest
    lines = [f"{view.run}  {view.state}" + (f"  {one_line(view.reason)}" if view.reason else "")]
    lines += [f"expected start {start}"] if (start := describe_start(screen, view)) else []
    share = f" ({100 * reading.step // view.total_steps} %)" if view.total_steps else ""
    speed, mfu = latest.get("tokens_per_s"), latest.get("mfu")
    words = [f"step {progress(reading.step, view.total_steps, ' of ')}{share}", f"loss {decimal(reading.loss)}"]
    words += [f"{count(round(speed))} tokens/s"] if isinstance(speed, (int, float)) else []
    words += [f"MFU {100 * mfu:.1f} %"] if mfu is not None else []
    lines += ["   ".join(words), *_speed_line(reading)]
    shares = describe_shares(time_shares(latest), {})
    lines += [f"rank 0: {shares}"] if shares else []
    if beat is not None:
        doing = STAGES.get(beat.state) or f"{beat.state}: {beat.phase}"
        place = f"attempt {beat.attempt} generation {beat.generation}"
        lines.append(f"{place}   {doing}   heartbeat {span(reading.silent_s)} ago")
    last = reading.last_checkpoint
    age = f", {span(last['age_s'])} ago" if last and last["age_s"] is not None else ""
    saved = f"step {count(last['step'])} {last['trust']}{age}" if last else "none"
    return [*lines, f"last checkpoint {saved}"]


def _speed_line(reading: LiveReading) -> list[str]:
    """Return the line with ETA, speed and loss trend; empty until at least one of them is known."""
    eta, seconds, (change, steps) = reading.view.eta_s, step_seconds(reading.steps), loss_trend(reading.steps)
    words = [f"ETA {span(eta)}"] if eta is not None else []
    words += [f"{seconds:.3g} s/step"] if seconds is not None else []
    words += [f"loss changed by {change:+.4f} in {steps} steps"] if change is not None else []
    return ["   ".join(words)] if words else []


def _cells(one: RankReading) -> dict[str, Any]:
    return {
        **asdict(one),
        "phase": f"{one.phase} ({one.moment})" if one.moment else one.phase,
        "still": f"{one.age:.1f} s" if one.age is not None and one.age >= STILL and not one.ended else "",
        "doing": "ended" if one.ended else PROCESS_STATES.get(one.state, ""),
        "work": f"{one.ratio:.2f} x" if one.ratio is not None else "",
    }


STAGES: dict[str, str] = {
    AttemptStage.JOINING: "checking nodes",
    AttemptStage.WARMING: "importing torch and your code",
    AttemptStage.CLEARING: "ending the remaining ranks",
}
"""What a job is doing while no rank is training."""
RANKS = [
    Column("RANK", "rank", right=True),
    Column("NODE", "node"),
    Column("STEP", "step", count, right=True),
    Column("PHASE", "phase"),
    Column("STILL FOR", "still", right=True),
    Column("OWN WORK", "work", right=True),
    Column("STATE", "doing"),
]
