"""`orch drill`: a fault on purpose, in a run that lives or in a demo of its own, and the score of what came of it."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.drills.disk_faults import damage_newest, expendable, fill_disk
from orchestrator.cli.drills.drill_preconditions import why_undetectable
from orchestrator.cli.drills.scorecard import ALIASES, EXPECTED, Scorecard, score
from orchestrator.cli.live_jobs.live_attempt import LiveAttempt, await_answer, await_end, find_live_attempt
from orchestrator.cli.runs.follow import RunFollower, following, is_over
from orchestrator.cli.runs.run_reader import StepLines
from orchestrator.cli.runs.status import one_row
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError, Precondition, RunFailed, WaitTimeout
from orchestrator.home import state_home
from trainer.contract.config import JobConfig
from trainer.contract.drill_config import KINDS
from trainer.contract.events import Event, EventKind
from trainer.contract.requests import RequestKind
from trainer.contract.run_dir import RunDir

STEP = 25
"""Of the demo: where a rank is hit."""
SAVED = 20
"""Of the demo: what the agents bring about is asked for when this step is trained and saved."""
SLOWER = 0.3
"""Seconds that a slow rank works more in every step; of a demo's step that is far more than a tenth."""
ANSWER = 30.0
_OF_NODES = ("kill-agent", "kill-node")
COSTLY = {
    "desync": "the run will be held", "desync-order": "the run will be held",
    "nan": "a batch is skipped for good", "spike": "a batch may be skipped for good",
    "full-disk": "its saves fail until a new job starts", "slow-rank": "its rank stays slow until the next restart",
    "corrupt-checkpoint": "its newest checkpoint is damaged for good",
}  # fmt: skip
"""What a fault costs a run beyond the time of a restart."""


@click.command(cls=Verb)
@click.argument("words", metavar="RUN KIND | --demo KIND [KEY=VALUE ...]", nargs=-1, required=True)
@click.option("--demo", is_flag=True, help="Use a small run of its own on this machine.")
@click.option("--rank", type=click.IntRange(0), default=None, help="The rank to hit (for node faults: the node).")
@click.option("-y", "--yes", is_flag=True, help="Allow faults that cost the run more than a restart.")
@click.option("--root", type=click.Path(path_type=Path), default=None, help="Folder for the demo's runs.")
@click.option("--timeout", type=click.FloatRange(min=1), default=300.0, show_default=True, metavar="SECONDS")
@click.pass_obj
def drill(
    screen: Screen, words: tuple[str, ...], demo: bool, rank: int | None, yes: bool, root: Path | None, timeout: float
) -> int:
    """Inject a fault and score the reaction.

    KIND is kill-rank, stop-rank, slow-rank, kill-agent, kill-node, hang-in-collective, desync, nan, full-disk or
    corrupt-checkpoint (docs/watching.md lists the rest). The score: seconds until it was noticed, whether the right
    rank was named, seconds until training continued, steps lost. The exit code is 8 if anything was wrong.
    """
    if demo:
        kind, overrides = _known(words[0]), words[1:]
        card, run = _in_a_demo(screen, kind, rank, root, overrides, timeout)
    else:
        if len(words) != 2:
            raise ConfigError("a drill takes a run and a kind", where="command line", hint="orch drill RUN kill-rank")
        run, kind = words[0], _known(words[1])
        card, run = _in_a_run(screen, run, kind, rank, yes, timeout)
    _show(screen, run, card)
    if card.passed:
        return 0
    if screen.json:
        return RunFailed.exit_code
    raise RunFailed(f"{kind}: {card.verdict}", where=run, hint=f"orch show {run}   orch logs {run} --rank first-error")


def _known(kind: str) -> str:
    if kind not in EXPECTED:
        raise ConfigError(f"no such fault: {kind}", where="command line", hint=f"one of {', '.join(EXPECTED)}")
    return kind


# -- in a run of somebody's own


def _in_a_run(
    screen: Screen, name: str, kind: str, rank: int | None, yes: bool, timeout: float
) -> tuple[Scorecard, str]:
    found = find_live_attempt(name)
    if kind == "full-disk":
        raise Precondition(
            "full-disk needs a job on this machine that is nobody else's", where="command line",
            hint="orch drill --demo full-disk",
        )  # fmt: skip
    _check(kind, found.run, found.config)
    # Last: whoever says --yes to it is not to hear another no.
    if kind in COSTLY and not yes:
        raise Precondition(
            f"{kind} costs {found.run} more than a restart: {COSTLY[kind]}", where="command line",
            hint=f"if that is meant:  orch drill {found.run} {kind} --yes      in a demo:  orch drill --demo {kind}",
        )  # fmt: skip
    with following(screen, found.run) as follower:
        follower.skip_existing()
        drill_run = _DrillRun(follower, found.run, kind, StepLines(found.folder, recent_only=True))
        drill_run.inject(screen, found, rank)
        return drill_run.until_over(timeout), found.run


def _check(kind: str, run: str, config: JobConfig) -> None:
    """Raises Precondition when the fault would come to nothing in a run of this configuration."""
    why = why_undetectable(kind, config)
    if why is not None:
        raise Precondition(f"{kind} tells nothing in {run}: {why}", where=run, hint=f"orch drill --demo {kind}")
    # A spare would go on from what memory holds, and nobody would read the damaged checkpoint.
    if kind == "corrupt-checkpoint" and config.cluster.spare_nodes:
        spares = config.cluster.spare_nodes
        raise Precondition(
            f"{kind} needs a job that ends with a node, and this one has cluster.spare_nodes={spares}",
            where="command line", hint=f"orch drill --demo {kind}",
        )  # fmt: skip


# -- in a demo


def _in_a_demo(
    screen: Screen, kind: str, rank: int | None, root: Path | None, overrides: tuple[str, ...], timeout: float
) -> tuple[Scorecard, str]:
    from orchestrator.cli.runs.submit import launch
    from orchestrator.config.compose import compose  # omegaconf: only for the verbs that read configurations

    folder = (root or state_home() / "demo-runs").expanduser().absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = (f"cluster.root={folder}", "cluster.kind=local", f"name=drill-{kind}", *_settings(kind, rank), *overrides)
    composed = compose("demo", words, environ=os.environ, preset_wins=True)
    _check(kind, "this demo", composed.config)
    screen.note(f"drill: 2 simulated nodes x 2 ranks train on this machine; {kind} strikes on the way")
    launched = launch(screen, composed, "local", no_controller=False)
    run = launched["run"]
    screen.note(f"{run}: job {launched['job_id']}, folder {launched['run_dir']}")
    with following(screen, run) as follower:
        drill_run = _DrillRun(follower, run, kind, StepLines(RunDir(Path(launched["run_dir"]))))
        if not _injected_by_rank(kind):
            drill_run.until_saved(timeout)
            drill_run.inject(screen, find_live_attempt(run), rank)
        card = drill_run.until_over(timeout)
        _await_demo_end(screen, follower, run, timeout)
    return card, run


def _await_demo_end(screen: Screen, follower: RunFollower, run: str, timeout: float) -> None:
    """Wait for the end of a demo, which would be forgotten if it were left alone; the score stands either way."""
    if is_over(one_row(run)):
        return
    try:
        follower.until(is_over, timeout)
    except WaitTimeout as late:
        screen.warn("goes_on", f"{late}; end it:  orch cancel {run}")


def _injected_by_rank(kind: str) -> bool:
    """Whether a rank brings it upon itself, as its configuration says."""
    return ALIASES.get(kind, kind) in KINDS


def _settings(kind: str, rank: int | None) -> tuple[str, ...]:
    """What the demo's configuration says of the fault."""
    if not _injected_by_rank(kind):
        unsaved = ("checkpoint.max_unsaved_steps=20",) if kind == "full-disk" else ()
        return ("drill.events=[]", "train.steps=120", *unsaved)
    value = f", value: {SLOWER}" if kind == "slow-rank" else ""
    event = f"kind: {ALIASES.get(kind, kind)}, rank: {1 if rank is None else rank}, step: {STEP}{value}"
    # Four ranks that do the same work: of two, nobody can say soon which one is odd.
    steps = ("train.steps=80", "parallel.tp=1", "parallel.dp_shard=4") if kind == "slow-rank" else ()
    return (f"drill.events=[{{{event}}}]", *steps)


# -- watching


class _DrillRun:
    """One drill as it goes: told on the way, scored when it is over."""

    def __init__(self, follower: RunFollower, run: str, kind: str, steps: StepLines) -> None:
        self._follower, self._run, self._kind, self._steps = follower, run, kind, steps
        self._done: list[Event] = []  # what this program did itself, as an event
        self._nodes: list[str] = []
        self._refused: Callable[[], None] = lambda: None  # raises when the job will not do it

    def inject(self, screen: Screen, found: LiveAttempt, at: int | None) -> None:
        """Bring the fault about, by ourselves or by asking the job, which tells by an event when it strikes."""
        self._nodes = [str(name) for name in found.heartbeat.get("nodes", ())]
        last = found.cluster.nodes - 1  # spares have no place that could be hit
        match self._kind:
            case "full-disk":
                writers = fill_disk(str(found.heartbeat["job_id"]))
                self._record_injection(found, step=found.heartbeat.get("step"))
                screen.note(f"{found.run}: {writers} checkpoint writers can write no more")
            case "corrupt-checkpoint":
                expendable(found.folder)
                # What memory holds is good: only a new job must read the disk. And while this one lives, it saves on.
                request = found.send_request(RequestKind.DRILL, "orch drill", value=last, detail="kill-agent")
                await_end(found, request, ANSWER)
                step, path = damage_newest(found.folder)
                self._record_injection(found, step=step)
                screen.note(f"{found.run}: turned some bytes over in {path}")
            case "kill-agent" | "kill-node":
                # The agent that is to be killed may not live to answer.
                value = last if at is None else at
                request = found.send_request(RequestKind.DRILL, "orch drill", value=value, detail=self._kind)
                self._refused = partial(found.raise_if_refused, request)
            case kind:
                detail = ALIASES.get(kind, kind)
                request = found.send_request(RequestKind.DRILL, "orch drill", value=at, detail=detail)
                screen.note(f"{found.run}: {await_answer(found, request, ANSWER)}")

    def _record_injection(self, found: LiveAttempt, **data: Any) -> None:
        place = {key: int(found.heartbeat.get(key) or 0) for key in ("attempt", "generation")}
        told = {"kind": self._kind, "rank": None, **data}
        self._done.append(Event(time=time.time(), source="drill", seq=1, kind=EventKind.DRILL, data=told, **place))

    def until_saved(self, seconds: float) -> None:
        """The demo has trained and saved enough to be hit."""
        row = self._follower.until(lambda row: is_over(row) or _saved(row) >= SAVED, seconds)
        if is_over(row):
            raise RunFailed(f"{self._run} was {row['state']} before anything could strike", where=row["reason"])

    def until_over(self, seconds: float) -> Scorecard:
        """Nothing more is to be expected of the fault, or time is up."""
        try:
            row = self._follower.until(self._is_over, seconds)
        except WaitTimeout:
            row = one_row(self._run)
        return self._card(row)

    def _is_over(self, row: dict[str, Any]) -> bool:
        self._refused()
        return self._card(row).over

    def _card(self, row: dict[str, Any]) -> Scorecard:
        events = sorted([*self._done, *map(self._with_node, self._follower.events)], key=lambda event: event.time)
        struck = max((event.attempt for event in events if event.kind == EventKind.DRILL), default=0)
        failure = _concluded(self._run, struck) if struck < row["attempts"] or is_over(row) else None
        return score(self._kind, events, self._steps.read(), state=row["state"], failure=failure)

    def _with_node(self, event: Event) -> Event:
        """Faults of nodes tell which one by its place in the job."""
        at = event.data.get("rank")
        if event.kind != EventKind.DRILL or event.data.get("kind") not in _OF_NODES or at is None:
            return event
        name = self._nodes[at] if at < len(self._nodes) else None
        return replace(event, data={"node": name, **event.data, "rank": None})


def _saved(row: dict[str, Any]) -> int:
    last = row["last_checkpoint"]
    return int(last["step"]) if last is not None else 0


def _concluded(run: str, attempt: int) -> dict[str, Any] | None:
    """What the controller made of an attempt that left nobody to say so."""
    with open_store(readonly=True) as store:
        return next((one.failure for one in store.attempts(run) if one.number == attempt), None)


def _show(screen: Screen, run: str, card: Scorecard) -> None:
    if screen.json:
        screen.data("drill", {"run": run, **card.to_json()})
        return
    screen.say(f"\n{card.kind} in {run}: {card.verdict}")
    for name, text in _lines(card).items():
        if text:
            screen.say(f"  {name:<10} {text}")


def _lines(card: Scorecard) -> dict[str, str]:
    right = {True: ", which is right", False: ", which is wrong", None: ""}
    return {
        "struck": card.struck,
        "noticed": f"after {card.detected_s:.2f} s: {card.noticed}" if card.detected_s is not None else "never",
        "blamed": (card.named or "nobody") + right[card.culprit_right] if card.culprit_right is not None else "",
        "taken for": (card.failure or "nothing") + right[card.kind_right] if card.kind_right is not None else "",
        "decided": card.decision or "",
        "back": f"at step {card.back_step} after {card.back_s:.2f} s" if card.back_s is not None else "",
        "lost": f"{card.steps_lost} steps trained again" if card.steps_lost is not None else "",
        "evidence": card.evidence or "",
    }
