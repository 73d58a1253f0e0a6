"""`orch drill`: inject a fault into a live run or a demo, and score the reaction."""

import resource
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil

from checkpointing.tiers.catalog import Catalog, Entry
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.drills.demo import damage, demo_root, launch_demo
from orchestrator.cli.drills.scorecard import ALIASES, EXPECTED, NODE_KINDS, Scorecard, score
from orchestrator.cli.live_jobs.live_attempt import LiveAttempt, await_end, find_live_attempt
from orchestrator.cli.runs.events import RunFollower, following
from orchestrator.cli.runs.node_setup import read_node_setup
from orchestrator.cli.runs.run_reader import StepLines
from orchestrator.cli.terminal.argument_types import NonEmptyPath, timeout_option
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError, Precondition, RunFailed, WaitTimeout
from orchestrator.near_words import hint_with_choices, nearest
from orchestrator.registry.records import Attempt
from orchestrator.run_view import RunView, find_run
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.fault_detection_config import BETWEEN_STAGES, KINDS
from trainer.protocol.config_sections.watch_config import OBSERVE
from trainer.protocol.events import Event, EventKind
from trainer.protocol.requests import RequestKind
from trainer.protocol.run_dir import RunDir

STEP = 25
"""Step of the demo at which a rank is hit."""
SLOWER = 0.3
"""Extra seconds of work per step for a slow rank, far more than a tenth of a demo step."""
SAVED = 20
"""Step of the demo that must be trained and saved before the agents inject a fault."""
ANSWER = 30.0
SETTLED = 5.0
"""Seconds for which a command's ranks must run to count as recovered, because their steps are unknown."""
_SLOW = 2.0
"""Seconds without an answer before a note about the delay; a training job answers within one second."""
_WRITER = "orch-writer"
DRILL_JSON = """
{run, kind, struck, rank, node, step, noticed, detected_s, named, culprit_right, failure, kind_right, decision,
back_s, back_step, steps_lost, evidence, over, passed, verdict}
"""


@click.command(cls=Verb, json_data=DRILL_JSON)
@click.argument("words", metavar="RUN KIND | --demo KIND [KEY=VALUE ...]", nargs=-1, required=True)
@click.option("--demo", is_flag=True, help="Use a small separate run on this machine.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="The rank to hit (for node faults: the node).")
@click.option("-y", "--yes", is_flag=True, help="Allow faults that cost the run more than a restart.")
@click.option("--root", type=NonEmptyPath(path_type=Path), help="Folder for the demo's runs.")
@timeout_option(300.0, least=1.0)
@click.pass_obj
def drill(
    screen: Screen, words: tuple[str, ...], demo: bool, rank: int | None, yes: bool, root: Path | None, timeout: float
) -> int:
    """Inject a fault and score the reaction.

    KIND is kill-rank, stop-rank, slow-rank, kill-agent, kill-node, hang-in-collective, desync, nan, full-disk or
    corrupt-checkpoint (docs/watching.md lists the rest). The score gives the seconds until the fault was noticed,
    whether the right rank was named, the seconds until training continued, and the steps lost.

    The fault strikes once every rank has trained a step. It counts against no node and uses up no restart. A fault that
    the configuration cannot detect is refused: for a `command:`, all but kills, and stop-rank if it is instrumented;
    hangs without `detection.hang.on`; slowness without `detection.straggler.on`. The exit code is 4 if nothing is
    running or the fault is refused, 8 if the reaction was wrong, and 124 if the ranks did not train in time.
    """
    if demo:
        kind = _require_kind(words[0])
        card, run = _in_a_demo(screen, kind, rank, root, words[1:], timeout)
    else:
        run, kind = _run_and_kind(words)
        card, run = _in_a_run(screen, run, kind, rank, yes, timeout)
    if screen.json:
        screen.data("drill", {"run": run, **asdict(card)})
        return 0 if card.passed else RunFailed.exit_code
    _show(screen, run, card)
    if not card.passed:
        hint = f"orch show {run}   orch logs {run} --rank first-error"
        raise RunFailed(f"{kind}: {card.verdict}", where=run, hint=hint)
    return 0


def _run_and_kind(words: tuple[str, ...]) -> tuple[str, str]:
    if len(words) == 1 and words[0] not in EXPECTED:
        find_live_attempt(words[0])  # report a missing live attempt before a missing kind
    if len(words) != 2:
        run = next((word for word in words if word not in EXPECTED), "RUN")
        hint = f"orch drill {shlex.quote(run)} kill-rank"
        raise ConfigError("a drill takes a run and a kind", where="command line", hint=hint)
    return words[0], _require_kind(words[1])


def _require_kind(kind: str) -> str:
    if kind not in EXPECTED:
        hint = hint_with_choices(nearest(kind, EXPECTED), f"one of {', '.join(EXPECTED)}")
        raise ConfigError(f"no such fault: {kind}", where="command line", hint=hint)
    return kind


def _in_a_run(
    screen: Screen, name: str, kind: str, rank: int | None, yes: bool, timeout: float
) -> tuple[Scorecard, str]:
    found = find_live_attempt(name)
    if kind == "full-disk":
        raise Precondition(
            "full-disk needs a private job on this machine", where="command line",
            hint="orch drill --demo full-disk",
        )  # fmt: skip
    instrumented = bool(read_node_setup(found.folder).watched.get("instrumented"))
    _check(kind, found.run, found.config, instrumented=instrumented)
    # This check comes last, so that nothing is refused after --yes.
    cost = extra_cost(kind, found.config, rank)
    if cost is not None and not yes:
        raise Precondition(
            f"{kind} costs {found.run} more than a restart: {cost}", where="command line",
            hint=f"to do it anyway:  orch drill {found.run} {kind} --yes      in a demo:  orch drill --demo {kind}",
        )  # fmt: skip
    with following(screen, found.run) as follower:
        follower.skip_existing()
        drill_run = DrillRun(
            follower, found.run, kind, StepLines(found.folder, recent_only=True), command=bool(found.config.command)
        )
        drill_run.inject(screen, found, rank, timeout)
        watched = screen.if_interrupted
        screen.if_interrupted = lambda: f"{kind} has been injected and is not undone; {watched()}"
        return drill_run.until_over(timeout), found.run


def _check(kind: str, run: str, config: JobConfig, *, instrumented: bool = False) -> None:
    why = why_undetectable(kind, config, instrumented=instrumented)
    if why is not None:
        raise Precondition(f"{kind} has no effect in {run}: {why}", where=run, hint=f"orch drill --demo {kind}")


def _in_a_demo(
    screen: Screen, kind: str, rank: int | None, root: Path | None, overrides: tuple[str, ...], timeout: float
) -> tuple[Scorecard, str]:
    note = f"drill: 2 simulated nodes x 2 ranks train on this machine; {kind} strikes along the way"
    settings = (f"cluster.root={demo_root(root)}", f"name=drill-{kind}", *_settings(kind, rank))
    run, run_dir = launch_demo(screen, overrides, settings, note, lambda config: _check(kind, "this demo", config))
    with following(screen, run) as follower:
        drill_run = DrillRun(follower, run, kind, StepLines(RunDir(run_dir)))
        if not _injected_by_rank(kind):
            drill_run.until_saved(timeout)
            drill_run.inject(screen, find_live_attempt(run), rank, timeout)
        card = drill_run.until_over(timeout)
        # The score does not need the end of the demo, but no other command watches the demo.
        try:
            follower.until(lambda view: view.is_over, timeout)
        except WaitTimeout as late:
            screen.warn("goes_on", f"{late}; end it:  orch cancel {run}")
    return card, run


def _injected_by_rank(kind: str) -> bool:
    """Return whether the rank injects the fault itself, because of `drill.events` in its configuration."""
    return ALIASES.get(kind, kind) in KINDS


def _settings(kind: str, rank: int | None) -> tuple[str, ...]:
    if not _injected_by_rank(kind):
        unsaved = ("checkpoint.max_unsaved_steps=20",) if kind == "full-disk" else ()
        return ("drill.events=[]", "train.steps=120", *unsaved)
    value = f", value: {SLOWER}" if kind == "slow-rank" else ""
    event = f"kind: {ALIASES.get(kind, kind)}, rank: {1 if rank is None else rank}, step: {STEP}{value}"
    # Use four ranks with the same work; with two, the slow one cannot be identified quickly.
    steps = ("train.steps=80", "parallel.tp=1", "parallel.dp_shard=4") if kind == "slow-rank" else ()
    return (f"drill.events=[{{{event}}}]", *steps)


def _show(screen: Screen, run: str, card: Scorecard) -> None:
    right = {True: ", which is right", False: ", which is wrong", None: ""}
    where = "its ranks run again" if card.back_step is None else f"at step {card.back_step}"
    lines = {
        "struck": card.struck,
        "noticed": f"after {card.detected_s:.2f} s: {card.noticed}" if card.detected_s is not None else "never",
        "blamed": (card.named or "no culprit") + right[card.culprit_right] if card.culprit_right is not None else "",
        "taken for": (card.failure or "nothing") + right[card.kind_right] if card.kind_right is not None else "",
        "decided": card.decision,
        "back": f"{where} after {card.back_s:.2f} s" if card.back_s is not None else "",
        "lost": f"{card.steps_lost} steps trained again" if card.steps_lost is not None else "",
        "evidence": card.evidence,
    }
    screen.say(f"\n{card.kind} in {run}: {card.verdict}")
    for name, text in lines.items():
        if text:
            screen.say(f"  {name:<10} {text}")


_COSTLY = {
    "desync": "the run will be held", "desync-order": "the run will be held",
    "nan": "a batch is skipped for good", "spike": "a batch may be skipped for good",
    "full-disk": "its saves fail until a new job starts", "slow-rank": "its rank stays slow until the next restart",
    "corrupt-checkpoint": "its newest checkpoint is damaged for good",
}  # fmt: skip
"""What a fault costs any run, beyond the time for a restart."""
_FROM_OUTSIDE = ("kill-rank", "stop-rank", "kill-agent", "kill-node", "full-disk")
"""Faults that need no help from a rank, because a user's program injects none."""


def why_undetectable(kind: str, config: JobConfig, *, instrumented: bool = False) -> str | None:
    """Return why a drill of this kind would have no visible effect; None if it would be detected.

    `instrumented`: whether a user's program reports its steps.
    """
    signs, detection, command = EXPECTED[kind].signs, config.detection, bool(config.command)
    own = "its ranks run a command of their own, which"
    unseen = "its ranks would wait until the time limit"
    reasons = (
        (command and kind == "stop-rank" and not instrumented, f"{own} has not reported a step to orch: {unseen}"),
        (command and kind == "stop-rank" and config.watch.action == OBSERVE, f"watch.action=observe: {unseen}"),
        (command and kind == "corrupt-checkpoint", f"{own} saves and loads in its own way"),
        (command and kind not in _FROM_OUTSIDE, f"{own} accepts no such request"),
        (
            kind in BETWEEN_STAGES and config.parallel.pipeline.ranks == 1,
            "its model is in one piece (parallel.pipeline.stages=1): no stage sends anything",
        ),
        (
            kind == "corrupt-checkpoint" and config.cluster.spare_nodes > 0,
            f"a spare node continues from memory (cluster.spare_nodes={config.cluster.spare_nodes})",
        ),
        # Only hang detection finds stopped ranks, and only straggler detection finds slow ones.
        (
            EventKind.INCIDENT in signs and not detection.hang.on,
            f"hang detection is off (detection.hang.on=false): {unseen}",
        ),
        (
            EventKind.STRAGGLER in signs and not detection.straggler.on,
            "straggler detection is off (detection.straggler.on=false): the rank would stay slow",
        ),
    )
    return next((why for applies, why in reasons if applies), None)


def extra_cost(kind: str, config: JobConfig, at: int | None) -> str | None:
    """Return the cost to this run beyond a restart, or None. `at` is the rank or node to hit (None: the default)."""
    if kind not in NODE_KINDS:
        return _COSTLY.get(kind)
    cluster = config.cluster
    # The coordinator runs on the first node, so no spare can replace that node.
    first = at == 0 or cluster.nodes == 1
    if cluster.spare_nodes and not first:
        return None
    why = "the coordinator is on its first node" if cluster.spare_nodes else "it has no spare node"
    return f"{why}, so a new job has to be submitted, which may wait in the queue"


def expendable(folder: RunDir) -> Entry:
    """Return the newest committed checkpoint. Raises Precondition if there is no older one to restore instead."""
    found = Catalog(folder.checkpoints).committed_entries() if folder.checkpoints.is_dir() else []
    if len(found) < 2:
        raise Precondition(
            f"{folder.name} has {len(found)} committed checkpoints in its own folder: without the newest one it could "
            "not go on", where=str(folder.checkpoints), hint=f"orch save {folder.name}   orch ckpt ls {folder.name}",
        )  # fmt: skip
    return found[0]


def damage_newest(folder: RunDir) -> tuple[int, Path]:
    """Damage the newest committed checkpoint; return its step and the file. Raises Precondition."""
    newest = expendable(folder)
    files = [path for path in (folder.checkpoints / newest.name).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    damage(largest, largest.stat().st_size // 2)
    return newest.step, largest


def fill_disk(job_id: str) -> int:
    """Stop the checkpoint writers of a job on this machine from writing to files; return their number.

    A file size limit simulates the full disk; really filling a disk would affect its other users.
    """
    job = psutil.Process(int(job_id.partition("-")[0]))
    writers = [process for process in job.children(recursive=True) if _title(process).startswith(_WRITER)]
    for writer in writers:
        _, hard = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (0, hard))
    return len(writers)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has exited in the meantime
        return ""


class DrillRun:
    """A drill in progress: prints progress, and scores the reaction at the end."""

    def __init__(
        self, follower: RunFollower, run: str, kind: str, steps: StepLines, *, command: bool = False
    ) -> None:  # fmt: skip
        """`command`: whether the ranks run a user's own program, whose steps are unknown."""
        self._follower, self._run, self._kind, self._steps = follower, run, kind, steps
        self._command = command
        self._done: list[Event] = []  # injections by this process, as events
        self._nodes: list[str] = []
        self._refused: Callable[[], object] = lambda: None  # raises if the job refuses the request

    def inject(self, screen: Screen, found: LiveAttempt, at: int | None, seconds: float) -> None:
        """Inject the fault, from this process or by a request to the job, and wait until it strikes.

        Raises Precondition if the job refuses it or ends first, WaitTimeout after `seconds`.
        """
        self._nodes = found.heartbeat.nodes
        last = found.config.cluster.nodes - 1  # a spare node cannot be the target
        match self._kind:
            case "full-disk":
                writers = fill_disk(found.heartbeat.job_id)
                self._record_injection(found, step=found.heartbeat.step)
                screen.note(f"{found.run}: {writers} checkpoint writers can no longer write")
            case "corrupt-checkpoint":
                expendable(found.folder)
                # The state in memory is good, so only a new job reads the disk. A live job would also keep saving.
                request = found.send_request(RequestKind.DRILL, "orch drill", value=last, detail="kill-agent")
                self._await_strike(screen, found, request, seconds)
                await_end(found, request, ANSWER)
                step, path = damage_newest(found.folder)
                self._record_injection(found, step=step)
                screen.note(f"{found.run}: damaged {path}")
            case kind:
                value = last if at is None and kind in NODE_KINDS else at
                request = found.send_request(
                    RequestKind.DRILL, "orch drill", value=value, detail=ALIASES.get(kind, kind)
                )
                self._await_strike(screen, found, request, seconds)

    def _await_strike(self, screen: Screen, found: LiveAttempt, request: str, seconds: float) -> None:
        """Wait until the job injects the fault and answers, which it does once all its ranks are training."""
        self._refused = partial(found.answer, request)
        began, noted = time.monotonic(), False

        def struck(view: RunView) -> bool:
            nonlocal noted
            self._refused()
            # A killed agent may die before it answers.
            if found.answer(request) is not None or any(each.kind == EventKind.DRILL for each in self._follower.events):
                return True
            if view.is_over or view.attempts > found.attempt_dir.number:
                why = f"attempt {found.attempt_dir.number} of {self._run} ended before {self._kind} struck"
                raise Precondition(why, where=view.reason or view.state, hint=f"orch show {self._run}")
            if not noted and time.monotonic() - began >= _SLOW:
                noted = True
                screen.note(f"{self._run}: its ranks are not training yet; {self._kind} strikes when they are")
            return False

        try:
            self._follower.until(struck, seconds)
        except WaitTimeout as late:
            raise WaitTimeout(
                f"{self._kind} has not struck {self._run} within {seconds:g} s: its ranks are not training yet",
                where=late.where, hint=f"it strikes when they are; see:  orch status {self._run} -w",
            ) from late  # fmt: skip
        if (answer := found.answer(request)) is not None:
            screen.note(f"{self._run}: {answer}")

    def _record_injection(self, found: LiveAttempt, **data: Any) -> None:
        place = {"attempt": found.heartbeat.attempt, "generation": found.heartbeat.generation}
        fields = {"kind": self._kind, "rank": None, **data}
        self._done.append(Event(time=time.time(), source="drill", seq=1, kind=EventKind.DRILL, data=fields, **place))

    def until_saved(self, seconds: float) -> None:
        """Wait until the demo has trained and saved enough steps. Raises RunFailed if it ends first."""

        def has_saved(view: RunView) -> bool:
            last = view.last_checkpoint
            return view.is_over or (last is not None and last["step"] >= SAVED)

        view = self._follower.until(has_saved, seconds)
        if view.is_over:
            what = f"{self._run} was {view.state} before anything could strike"
            raise RunFailed(what, where=view.reason, hint=f"orch show {self._run}")

    def until_over(self, seconds: float) -> Scorecard:
        """Wait until the drill is over or `seconds` have passed, and return the score."""
        try:
            view = self._follower.until(self._is_over, seconds)
        except WaitTimeout:
            view = find_run(self._run)
        return self._card(view)

    def _is_over(self, view: RunView) -> bool:
        self._refused()
        return self._card(view).over

    def _card(self, view: RunView) -> Scorecard:
        events = sorted([*self._done, *map(self._with_node, self._follower.events)], key=lambda event: event.time)
        struck = max((event.attempt for event in events if event.kind == EventKind.DRILL), default=0)
        ended: Attempt | None = None
        if struck < view.attempts or view.is_over:  # an attempt may end without an outcome
            with open_store(readonly=True) as store:
                ended = next((one for one in store.attempts(self._run) if one.number == struck), None)
        # The controller has the last step, which a full disk may have kept out of the files.
        newest = [{"attempt": struck, "generation": 0, "step": ended.last_step}] if ended and ended.last_step else []
        failure = ended.failure if ended else None
        running_for = SETTLED if self._command else None
        return score(
            self._kind, events, [*self._steps.read(), *newest], state=view.state, failure=failure, now=time.time(),
            running_for=running_for,
        )  # fmt: skip

    def _with_node(self, event: Event) -> Event:
        """Return the event of a node fault, with the node's name instead of its index in the job."""
        at = event.data.get("rank")
        if event.kind != EventKind.DRILL or event.data.get("kind") not in NODE_KINDS or at is None:
            return event
        name = self._nodes[at] if at < len(self._nodes) else None
        return replace(event, data={"node": name, **event.data, "rank": None})
