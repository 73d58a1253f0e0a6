"""`orch top`: step, speed and loss of a live run, and the phase of every rank."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.access.run_folder import existing_folder
from orchestrator.cli.live_jobs.live_attempt import newest_ranks
from orchestrator.cli.runs.events import is_over
from orchestrator.cli.runs.run_reader import EventFeed, StepMetrics, newest_heartbeat
from orchestrator.cli.runs.status import one_row, warn_without_controller
from orchestrator.cli.runs.timeline import EventDescriber
from orchestrator.cli.terminal.argument_types import Seconds
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, decimal, iso, one_line, progress, span
from orchestrator.home import registry_path
from orchestrator.registry.fast_queries import saved_steps
from trainer.protocol.events import EventKind
from trainer.protocol.heartbeat import AttemptStage, Heartbeat
from trainer.protocol.rank_readings import RankReading, RankReadings
from trainer.protocol.run_dir import AttemptDir, RunDir

_FEWEST = 5
"""Minimum number of steps for a trend."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpeed:
    """Speed and loss trend of a run, with None for values that are not known yet.

    `step_seconds` excludes the time between steps. `loss_change` is the change of a straight line fitted to the losses
    of the last `loss_steps` steps.
    """

    step_seconds: float | None = None
    loss_change: float | None = None
    loss_steps: int = 0


def training_speed(steps: Sequence[StepMetrics]) -> TrainingSpeed:
    """Return the speed of the newest generation among `steps`, which are in training order."""
    if not steps:
        return TrainingSpeed()
    newest = steps[-1]
    own = [one for one in steps if (one.attempt, one.generation) == (newest.attempt, newest.generation)]
    took = [one.seconds for one in own if isinstance(one.seconds, (int, float))]
    change = _change(own)
    return TrainingSpeed(
        step_seconds=sum(took) / len(took) if took else None,
        loss_change=change,
        loss_steps=newest.step - own[0].step if change is not None else 0,
    )


def _change(own: Sequence[StepMetrics]) -> float | None:
    """Return the change of a least-squares line, in which a noisy step does not make a trend."""
    points = [(one.step, one.loss) for one in own if isinstance(one.loss, (int, float)) and math.isfinite(one.loss)]
    if len(points) < _FEWEST or points[-1][0] == points[0][0]:
        return None
    middle = sum(step for step, _ in points) / len(points)
    spread = sum((step - middle) ** 2 for step, _ in points)
    slope = sum((step - middle) * loss for step, loss in points) / spread
    return slope * (points[-1][0] - points[0][0])


MOST = 64
"""Maximum number of ranks with a line each; of more ranks, the `WORST` are shown."""
WORST = 10
_ABOVE = 3
"""Lines above the first rank: an empty one, the summary and the column titles."""
EVENTS = 5
STILL = 2.0
"""Seconds without an update of its progress cell after which a rank is shown as still."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """State of a run at the time `at`; ages are in seconds."""

    at: float
    row: dict[str, Any]  # of the registry, as in `orch status`
    beat: Heartbeat | None
    metric: StepMetrics | None
    ranks: Sequence[RankReading]
    world: int
    events: list[tuple[float, str]]
    speed: TrainingSpeed = TrainingSpeed()
    judged: frozenset[int] = frozenset()  # steps of checkpoints whose trust is in the registry
    saved: tuple[int, float] | None = None  # step and time of the newest commit in the job's events

    @property
    def last_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint; the job's own files have it before the registry does."""
        known: dict[str, Any] | None = self.row["last_checkpoint"]
        told: list[tuple[int, float | None]] = [(self.beat.saved_step if self.beat is not None else 0, None)]
        told += [(self.saved[0], _since(self.at, self.saved[1]))] if self.saved is not None else []
        step, age = max(told, key=lambda one: (one[0], one[1] is not None))
        # A step in the registry that is not its newest checkpoint may be CORRUPT.
        if step in self.judged or step <= (known["step"] if known is not None else 0):
            return known
        return {"step": step, "trust": "COMMITTED", "age_s": age}

    @property
    def step(self) -> int:
        newest = self.metric.step if self.metric is not None else 0
        told = self.beat.step if self.beat is not None else 0
        return max(newest, told or 0, int(self.row["step"] or 0))

    @property
    def eta_s(self) -> float | None:
        """Remaining seconds, as in `orch status`."""
        left: float | None = self.row["eta_s"]
        return left

    def to_json(self) -> dict[str, Any]:
        metric, last, beat = self.metric, self.last_checkpoint, self.beat
        return {
            "run": self.row["run"], "state": self.row["state"], "step": self.step,
            "total_steps": self.row["total_steps"],
            "loss": metric.loss if metric is not None else self.row["loss"],
            "tokens_per_s": metric.tokens_per_s if metric is not None else None,
            **{key: beat and getattr(beat, key) for key in ("attempt", "generation", "phase", "saved_step")},
            "silent_s": _since(self.at, beat and beat.time), "last_checkpoint": last, "world": self.world,
            "ranks": [asdict(rank) for rank in self.ranks],
            "events": [{"time": iso(when), "text": text} for when, text in self.events],
            "step_seconds": self.speed.step_seconds, "eta_s": self.eta_s,
            "loss_change": self.speed.loss_change, "loss_steps": self.speed.loss_steps,
        }  # fmt: skip


class LiveRunReader:
    """Repeated reader of a run; continues in the events where the last read stopped."""

    def __init__(self, run: str, run_dir: Path) -> None:
        self._run, self._folder, self._feed = run, RunDir(run_dir), EventFeed(run_dir, recent_only=True)
        self._describer = EventDescriber()
        self._told: deque[tuple[float, str]] = deque(maxlen=EVENTS)
        self._saves: dict[str, tuple[int, float]] = {}  # by name: step and time

    def read(self) -> Reading:
        for event in self._feed.poll():
            if event.kind in (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_SEEN) and "step" in event.data:
                self._saves[str(event.data.get("name"))] = int(event.data["step"]), event.time
            elif event.kind in (EventKind.CHECKPOINT_SET_ASIDE, EventKind.CHECKPOINT_DELETED):
                self._saves.pop(str(event.data.get("name")), None)
            text = self._describer.describe(event)
            if text is not None:
                self._told.append((event.time, text))
        attempts = self._folder.all_attempts()
        beat = newest_heartbeat(attempts[-1]) if attempts else None
        told = _rank_readings(attempts[-1], beat) if beat is not None else None
        row, now = one_row(self._run), time.time()
        over = is_over(row)
        return Reading(
            at=now, row=row, beat=beat, metric=self._feed.latest,
            ranks=told.ranks if told is not None and not over else (),  # readings of an ended run are stale
            judged=frozenset(step for step, _ in saved_steps(registry_path(), self._run)),
            world=told.world if told is not None else 0, events=list(self._told),
            saved=max(self._saves.values(), default=None),
            speed=training_speed(self._feed.recent),
        )  # fmt: skip


def _rank_readings(attempt: AttemptDir, beat: Heartbeat) -> RankReadings | None:
    """Return the readings of the ranks; None if they are of an earlier generation."""
    told = newest_ranks(attempt)
    return told if told is not None and told.generation == beat.generation else None


def _since(now: float, moment: Any) -> float | None:
    return round(max(0.0, now - float(moment)), 3) if isinstance(moment, (int, float)) else None


def worst(ranks: Sequence[RankReading], most: int = WORST) -> Sequence[RankReading]:
    """Return the ranks that most need attention: stopped, slow, furthest behind, longest without progress."""

    def badness(one: RankReading) -> tuple[bool, float, int, float]:
        return one.state in STATES and not one.ended, one.ratio or 0.0, -(one.step or 0), one.age or 0.0

    return sorted(sorted(ranks, key=badness, reverse=True)[:most], key=lambda one: one.rank)


TOP_JSON = """
{run, state, step, total_steps, loss, tokens_per_s, attempt, generation, phase, silent_s, last_checkpoint, saved_step,
world, ranks: [{rank, node, step, phase, age, state, ratio, ended}], events: [{time, text}], step_seconds, eta_s,
loss_change, loss_steps}; for a command, step and age of a rank are null
"""


@click.command(cls=Verb, json_data=TOP_JSON)
@click.argument("run")
@click.option("--once", is_flag=True, help="Print once and exit (the default without a terminal).")
@click.option(
    "--every",
    type=Seconds(min=0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
@click.pass_obj
def top(screen: Screen, run: str, once: bool, every: float) -> None:
    """Show a live run: step, tokens/s, loss, last checkpoint, and where every rank is. Ctrl-C ends the display.

    For every rank it prints the phase, the time since it last moved, its own work relative to its peers', and
    whether its process is stopped. With more than 64 ranks, or more than fit, it shows those that need attention.
    ETA is the time left at the speed of the newest generation.

    It reads only files of the newest attempt, so it may show a checkpoint before the registry has it.
    docs/watching.md explains the phases.
    """
    row = one_row(run)
    reader = LiveRunReader(row["run"], existing_folder(row["run"], row["run_dir"]).path)
    warn_without_controller(screen, [row])
    if screen.json:
        screen.data("top", reader.read().to_json())
        return
    if once or not screen.terminal:
        _print(screen, reader.read())
        return
    screen.if_interrupted = lambda: ""  # the usual way to leave
    with screen.live_page() as draw:
        while True:
            reading = reader.read()
            draw(partial(_print, screen, reading))
            if is_over(reading.row):
                return
            time.sleep(every)


def _print(screen: Screen, reading: Reading) -> None:
    for line in head(reading):
        screen.say(line)
    if reading.events:
        screen.say("")
    # Above the ranks, because a live display is cut at the bottom of the terminal.
    remaining_space = screen.remaining_space
    for line in format_events(reading, screen, remaining_space[1] if remaining_space is not None else None):
        screen.say(line, hang=len(screen.when(0.0)) + 2)
    remaining_space = screen.remaining_space
    rows = select_ranks(reading, remaining_space[0] if remaining_space is not None else None)
    if rows:
        screen.say(
            "" if len(rows) == reading.world else f"\nthe {len(rows)} of {count(reading.world)} ranks to look at"
        )
        screen.table(RANKS, [_flat(one) for one in rows], aligned=True)


def format_events(reading: Reading, screen: Screen, width: int | None) -> list[str]:
    """Return the events, newest last. In a live display, all but the newest are cut to one line of `width`."""
    lines = [f"{screen.when(when)}  {one_line(text)}" for when, text in reading.events]
    return lines if width is None else [*(_cut(line, width) for line in lines[:-1]), *lines[-1:]]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def select_ranks(reading: Reading, lines: int | None) -> Sequence[RankReading]:
    """Return the ranks to show: all if they fit into `lines` (None: no limit), else the worst."""
    rows = reading.ranks if reading.world <= MOST else worst(reading.ranks)
    if lines is None or len(rows) + _ABOVE <= lines:
        return rows
    return worst(rows, max(1, lines - _ABOVE))


def head(reading: Reading) -> list[str]:
    """Return the lines about the run as a whole."""
    row, beat, metric = reading.row, reading.beat, reading.metric
    share = f" ({100 * reading.step // row['total_steps']} %)" if row["total_steps"] else ""
    lines = [f"{row['run']}  {row['state']}" + (f"  {one_line(row['reason'])}" if row["reason"] else "")]
    speed = metric.tokens_per_s if metric is not None else None
    loss = metric.loss if metric is not None else row["loss"]
    words = [f"step {progress(reading.step, row['total_steps'], ' of ')}{share}", f"loss {decimal(loss)}"]
    words += [f"{count(round(speed))} tokens/s"] if isinstance(speed, (int, float)) else []
    words += [f"MFU {100 * metric.mfu:.1f} %"] if metric is not None and metric.mfu is not None else []
    lines.append("   ".join(words))
    lines += _speed_words(reading.speed, reading.eta_s)
    lines += _share_words(metric.shares) if metric is not None else []
    if beat is not None:
        silent = _since(reading.at, beat.time)
        said = f"attempt {beat.attempt} generation {beat.generation}   {_doing(beat)}"
        lines.append(f"{said}   heartbeat {span(silent)} ago")
    last = reading.last_checkpoint
    age = f", {span(last['age_s'])} ago" if last and last["age_s"] is not None else ""
    saved = f"step {count(last['step'])} {last['trust']}{age}" if last else "none"
    return [*lines, f"last checkpoint {saved}"]


def _doing(beat: Heartbeat) -> str:
    """Describe the activity of the job: the phase of its ranks while they run."""
    return STAGES.get(beat.state) or f"{beat.state}: {beat.phase}"


def _speed_words(speed: TrainingSpeed, eta_s: float | None) -> list[str]:
    """Return one line, or none before the run has a speed."""
    words = [f"ETA {span(eta_s)}"] if eta_s is not None else []
    words += [f"{speed.step_seconds:.3g} s/step"] if speed.step_seconds is not None else []
    if speed.loss_change is not None:
        words.append(f"loss changed by {speed.loss_change:+.4f} in {count(speed.loss_steps)} steps")
    return ["   ".join(words)] if words else []


def _share_words(shares: Mapping[str, float]) -> list[str]:
    """Return one line with the shares of a step's time on rank 0, without those below half a percent."""
    words = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= 0.005]
    return [f"rank 0: {', '.join(words)}"] if words else []


def _flat(one: RankReading) -> dict[str, Any]:
    still = f"{one.age:.1f} s" if one.age is not None and one.age >= STILL and not one.ended else ""
    doing = "ended" if one.ended else STATES.get(one.state, "")
    work = f"{one.ratio:.2f} x" if one.ratio is not None else ""
    phase = f"{one.phase} ({one.moment})" if one.moment else one.phase
    return {**asdict(one), "phase": phase, "still": still, "doing": doing, "work": work}


STAGES: dict[str, str] = {
    AttemptStage.JOINING: "checking nodes",
    AttemptStage.WARMING: "importing torch and your code",
    AttemptStage.CLEARING: "ending the remaining ranks",
}
"""Activities of a job while no rank trains."""
STATES = {"T": "stopped", "t": "traced", "D": "waits for a device", "Z": "dead", "X": "gone"}
RANKS = [
    Column("RANK", "rank", right=True),
    Column("NODE", "node"),
    Column("STEP", "step", count, right=True),
    Column("PHASE", "phase"),
    Column("STILL FOR", "still", right=True),
    Column("OWN WORK", "work", right=True),
    Column("STATE", "doing"),
]
