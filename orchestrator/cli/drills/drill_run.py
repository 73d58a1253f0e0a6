"""Run a drill: check the preconditions, inject the fault from here or in the job, and score the reaction."""

import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from checkpointing.tiers.catalog import Catalog, Entry
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.drills.scorecard import ALIASES, EXPECTED, NODE_KINDS, Scorecard, score
from orchestrator.cli.live_jobs.live_attempt import LiveAttempt, await_end
from orchestrator.cli.runs.events import RunFollower
from orchestrator.cli.runs.run_reader import StepLines
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import Precondition, RunFailed, WaitTimeout
from orchestrator.registry.records import Attempt
from orchestrator.run_view import RunView, find_run
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.fault_detection_config import BETWEEN_STAGES
from trainer.protocol.events import Event, EventKind
from trainer.protocol.requests import RequestKind
from trainer.protocol.run_dir import RunDir

_COSTLY = {
    "desync": "the run will be held", "desync-order": "the run will be held",
    "nan": "a batch is skipped for good", "spike": "a batch may be skipped for good",
    "full-disk": "its saves fail until a new job starts", "slow-rank": "its rank stays slow until the next restart",
    "corrupt-checkpoint": "its newest checkpoint is damaged for good",
}  # fmt: skip
"""Cost of a fault to any run, beyond the time of a restart."""
_FROM_OUTSIDE = ("kill-rank", "kill-agent", "kill-node", "full-disk")
"""Faults that need no help from a rank, and whose end is visible from outside."""


def why_undetectable(kind: str, config: JobConfig) -> str | None:
    """Return why a drill of this kind would have no visible effect; None if it is detected."""
    signs, detection, command = EXPECTED[kind].signs, config.detection, bool(config.command)
    own = "its ranks run a command of their own, which"
    unseen = "its ranks would wait until the time limit"
    reasons = (
        # A user's own program has no progress cell: it takes no orders, and its steps are unknown.
        (command and kind == "stop-rank", f"{own} is not watched for hangs: {unseen}"),
        (command and kind == "corrupt-checkpoint", f"{own} saves and loads in its own way"),
        (command and kind not in _FROM_OUTSIDE, f"{own} takes no such order"),
        (
            kind in BETWEEN_STAGES and config.parallel.pipeline.ranks == 1,
            "its model is in one piece (parallel.pipeline.stages=1): no stage sends anything",
        ),
        # Stopped ranks are found by hang detection alone, slow ones by straggler detection alone.
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
    """Return the cost to this run beyond a restart, or None. `at` is the rank or node to hit; None is the default."""
    if kind not in NODE_KINDS:
        return _COSTLY.get(kind)
    cluster = config.cluster
    # The coordinator lives on the first node, so no spare can replace that node.
    first = at == 0 or cluster.nodes == 1
    if cluster.spare_nodes and not first:
        return None
    why = "the coordinator is on its first node" if cluster.spare_nodes else "it has no spare node"
    return f"{why}, so a new job has to be submitted, which may wait in the queue"


SAVED = 20
"""Step of the demo that must be trained and saved before the agents inject a fault."""
ANSWER = 30.0
SETTLED = 5.0
"""Seconds for which a command's ranks must run to count as recovered, since their steps are unknown."""
_SLOW = 2.0
"""Seconds without an answer before a note about the delay; a training job answers within one second."""
_WRITER = "orch-writer"
_DAMAGE = 64
"""Bytes inverted in the middle of the largest file."""


def expendable(folder: RunDir) -> Entry:
    """Return the newest committed checkpoint. Raises Precondition without an older one to restore instead."""
    found = Catalog(folder.checkpoints).committed_entries() if folder.checkpoints.is_dir() else []
    if len(found) < 2:
        raise Precondition(
            f"{folder.name} has {len(found)} committed checkpoints in its own folder: without the newest one it could "
            "not go on", where=str(folder.checkpoints), hint=f"orch save {folder.name}   orch ckpt ls {folder.name}",
        )  # fmt: skip
    return found[0]


def damage_newest(folder: RunDir) -> tuple[int, Path]:
    """Invert bytes of the newest committed checkpoint; return its step and the file. Raises Precondition."""
    newest = expendable(folder)
    files = [path for path in (folder.checkpoints / newest.name).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    middle = largest.stat().st_size // 2
    if largest.stat().st_nlink > 1:  # hard-linked to another run's checkpoint, which must stay intact
        own = largest.with_name(f"{largest.name}.own")
        shutil.copyfile(largest, own)
        os.replace(own, largest)
    descriptor = os.open(largest, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(descriptor, _DAMAGE, middle)
        os.pwrite(descriptor, bytes(255 - byte for byte in before), middle)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return newest.step, largest


def fill_disk(job_id: str) -> int:
    """Stop all checkpoint writers of a job on this machine from writing to files; return their number.

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
    except psutil.Error:  # it has ended meanwhile
        return ""


class DrillRun:
    """A drill in progress: prints progress, and scores the reaction at the end."""

    def __init__(
        self, follower: RunFollower, run: str, kind: str, steps: StepLines, *, command: bool = False
    ) -> None:  # fmt: skip
        """`command`: the ranks are a user's own program with unknown steps."""
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
        last = found.cluster.nodes - 1  # a spare node cannot be the target
        match self._kind:
            case "full-disk":
                writers = fill_disk(found.heartbeat.job_id)
                self._record_injection(found, step=found.heartbeat.step)
                screen.note(f"{found.run}: {writers} checkpoint writers can write no more")
            case "corrupt-checkpoint":
                expendable(found.folder)
                # The state in memory is good, so only a new job reads the disk; and a live job would keep saving.
                request = found.send_request(RequestKind.DRILL, "orch drill", value=last, detail="kill-agent")
                self._await_strike(screen, found, request, seconds)
                await_end(found, request, ANSWER)
                step, path = damage_newest(found.folder)
                self._record_injection(found, step=step)
                screen.note(f"{found.run}: inverted some bytes in {path}")
            case kind:
                value = last if at is None and kind in NODE_KINDS else at
                request = found.send_request(
                    RequestKind.DRILL, "orch drill", value=value, detail=ALIASES.get(kind, kind)
                )
                self._await_strike(screen, found, request, seconds)

    def _await_strike(self, screen: Screen, found: LiveAttempt, request: str, seconds: float) -> None:
        """Wait until the job injects the fault and answers, which it does once all its ranks train."""
        self._refused = partial(found.answer, request)
        began, noted = time.monotonic(), False

        def struck(view: RunView) -> bool:
            nonlocal noted
            self._refused()
            # With kill-agent, the agent may die before it answers.
            if found.answer(request) is not None or any(each.kind == EventKind.DRILL for each in self._follower.events):
                return True
            if view.is_over or view.attempts > found.attempt_dir.number:
                why = f"attempt {found.attempt_dir.number} of {self._run} ended before {self._kind} struck"
                raise Precondition(why, where=view.reason or view.state, hint=f"orch show {self._run}")
            if not noted and time.monotonic() - began >= _SLOW:
                noted = True
                screen.note(f"{self._run}: its ranks do not train yet; {self._kind} strikes when they do")
            return False

        try:
            self._follower.until(struck, seconds)
        except WaitTimeout as late:
            raise WaitTimeout(
                f"{self._kind} has not struck {self._run} within {seconds:g} s: its ranks do not train yet",
                where=late.where, hint=f"it strikes when they do; see:  orch status {self._run} -w",
            ) from late  # fmt: skip
        if (answer := found.answer(request)) is not None:
            screen.note(f"{self._run}: {answer}")

    def _record_injection(self, found: LiveAttempt, **data: Any) -> None:
        place = {"attempt": found.heartbeat.attempt, "generation": found.heartbeat.generation}
        fields = {"kind": self._kind, "rank": None, **data}
        self._done.append(Event(time=time.time(), source="drill", seq=1, kind=EventKind.DRILL, data=fields, **place))

    def until_saved(self, seconds: float) -> None:
        """Wait until the demo has trained and saved enough steps. Raises RunFailed if it ends first."""
        view = self._follower.until(lambda view: view.is_over or _last_saved_step(view) >= SAVED, seconds)
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
        ended = _find_attempt(self._run, struck) if struck < view.attempts or view.is_over else None
        # The controller has the last step, which a full disk may have kept out of the files.
        newest = [{"attempt": struck, "generation": 0, "step": ended.last_step}] if ended and ended.last_step else []
        failure = ended.failure if ended else None
        running_for = SETTLED if self._command else None
        about: dict[str, Any] = {
            "state": view.state,
            "failure": failure,
            "now": time.time(),
            "running_for": running_for,
        }
        return score(self._kind, events, [*self._steps.read(), *newest], **about)

    def _with_node(self, event: Event) -> Event:
        """Return a node fault's event with the node's name in place of its index in the job."""
        at = event.data.get("rank")
        if event.kind != EventKind.DRILL or event.data.get("kind") not in NODE_KINDS or at is None:
            return event
        name = self._nodes[at] if at < len(self._nodes) else None
        return replace(event, data={"node": name, **event.data, "rank": None})


def _last_saved_step(view: RunView) -> int:
    last = view.last_checkpoint
    return int(last["step"]) if last is not None else 0


def _find_attempt(run: str, attempt: int) -> Attempt | None:
    """Return the controller's record of an attempt, which may have died without an outcome."""
    with open_store(readonly=True) as store:
        return next((one for one in store.attempts(run) if one.number == attempt), None)
