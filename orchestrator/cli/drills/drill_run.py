"""Drill: preconditions, injection and score."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.drills.scorecard import ALIASES, EXPECTED, NODE_KINDS, Scorecard, score
from orchestrator.cli.drills.small_disk import SmallDisk, damage_newest, expendable, fill_disk
from orchestrator.cli.live_jobs.live_attempt import LiveAttempt, await_end
from orchestrator.cli.runs.events import RunFollower, is_over
from orchestrator.cli.runs.run_reader import StepLines
from orchestrator.cli.runs.status import one_row
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import Precondition, RunFailed, WaitTimeout
from orchestrator.registry.records import Attempt
from orchestrator.states import RunState
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.fault_detection_config import BETWEEN_STAGES
from trainer.protocol.events import Event, EventKind
from trainer.protocol.failures.save_trouble import SAVES_FAILING
from trainer.protocol.requests import RequestKind

_COSTLY = {
    "desync": "the run will be held", "desync-order": "the run will be held",
    "nan": "a batch is skipped for good", "spike": "a batch may be skipped for good",
    "full-disk": "its saves fail until a new job starts", "slow-rank": "its rank stays slow until the next restart",
    "corrupt-checkpoint": "its newest checkpoint is damaged for good",
}  # fmt: skip
"""Costs of a fault to any run beyond the time of a restart."""
_FROM_OUTSIDE = ("kill-rank", "kill-agent", "kill-node", "full-disk")
"""Faults that need no cooperation of a rank and whose end is visible from outside."""


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


class DrillRun:
    """A drill in progress: prints progress, and scores the reaction at the end."""

    def __init__(
        self, follower: RunFollower, run: str, kind: str, steps: StepLines, *, command: bool = False,
        disk: SmallDisk | None = None,
    ) -> None:  # fmt: skip
        """`command`: the ranks are a user's own program with unknown steps. `disk`: the disk to fill."""
        self._follower, self._run, self._kind, self._steps = follower, run, kind, steps
        self._command, self._disk = command, disk
        self._done: list[Event] = []  # injections by this process, as events
        self._nodes: list[str] = []
        self._refused: Callable[[], None] = lambda: None  # raises if the job refuses the request

    def inject(self, screen: Screen, found: LiveAttempt, at: int | None, seconds: float) -> None:
        """Inject the fault, from this process or by a request to the job, and wait until it strikes.

        Raises Precondition if the job refuses it or ends first, WaitTimeout after `seconds`.
        """
        self._nodes = found.heartbeat.nodes
        last = found.cluster.nodes - 1  # a spare node cannot be the target
        match self._kind:
            case "full-disk" if self._disk is not None:
                self._disk.fill()
                self._record_injection(found, step=found.heartbeat.step)
                screen.note(f"{found.run}: its disk is full, {self._disk.path}")
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
                screen.note(f"{found.run}: turned some bytes over in {path}")
            case kind:
                value = last if at is None and kind in NODE_KINDS else at
                request = found.send_request(
                    RequestKind.DRILL, "orch drill", value=value, detail=ALIASES.get(kind, kind)
                )
                self._await_strike(screen, found, request, seconds)

    def _await_strike(self, screen: Screen, found: LiveAttempt, request: str, seconds: float) -> None:
        """Wait until the job injects the fault and answers, which it does once all its ranks train."""
        self._refused = partial(found.raise_if_refused, request)
        began, told = time.monotonic(), False

        def struck(row: dict[str, Any]) -> bool:
            nonlocal told
            self._refused()
            # With kill-agent, the agent may die before it answers.
            if found.answer(request) is not None or any(each.kind == EventKind.DRILL for each in self._follower.events):
                return True
            if is_over(row) or row["attempts"] > found.attempt_dir.number:
                why = f"attempt {found.attempt_dir.number} of {self._run} ended before {self._kind} struck"
                raise Precondition(why, where=row["reason"] or row["state"], hint=f"orch show {self._run}")
            if not told and time.monotonic() - began >= _SLOW:
                told = True
                screen.note(f"{self._run}: its ranks do not train yet; {self._kind} strikes when they do")
            return False

        try:
            self._follower.until(struck, seconds)
        except WaitTimeout as late:
            raise WaitTimeout(
                f"{self._kind} has not struck {self._run} within {seconds:g} s: its ranks do not train yet",
                where=late.where, hint=f"it strikes when they do; look:  orch status {self._run} -w",
            ) from late  # fmt: skip
        if (answer := found.answer(request)) is not None:
            screen.note(f"{self._run}: {answer}")

    def _record_injection(self, found: LiveAttempt, **data: Any) -> None:
        place = {"attempt": found.heartbeat.attempt, "generation": found.heartbeat.generation}
        told = {"kind": self._kind, "rank": None, **data}
        self._done.append(Event(time=time.time(), source="drill", seq=1, kind=EventKind.DRILL, data=told, **place))

    def until_saved(self, seconds: float) -> None:
        """Wait until the demo has trained and saved enough steps. Raises RunFailed if it ends first."""
        row = self._follower.until(lambda row: is_over(row) or _last_saved_step(row) >= SAVED, seconds)
        if is_over(row):
            what = f"{self._run} was {row['state']} before anything could strike"
            raise RunFailed(what, where=row["reason"], hint=f"orch show {self._run}")

    def until_over(self, seconds: float) -> Scorecard:
        """Wait until the drill is over or `seconds` have passed, and return the score."""
        try:
            row = self._follower.until(self._is_over, seconds)
        except WaitTimeout:
            row = one_row(self._run)
        return self._card(row)

    def _is_over(self, row: dict[str, Any]) -> bool:
        self._refused()
        if self._disk is not None and self._disk.is_filled:
            self._keep_full(self._disk, row)
        return self._card(row).over

    def _keep_full(self, disk: SmallDisk, row: dict[str, Any]) -> None:
        """Keep the disk full until the attempt has ended because of it.

        Call it repeatedly: a save deletes its half-written files, which frees space for the next one. The disk cannot
        take the event of the failed save, so that event is derived from the run's reason.
        """
        if row["state"] == RunState.RECOVERING:
            disk.make_room()
            return
        disk.fill()
        saves, _, _ = str(row["reason"]).partition("; ")
        if saves.startswith(SAVES_FAILING) and not any(one.kind == EventKind.CHECKPOINT_FAILED for one in self._done):
            struck = self._done[-1]
            self._done.append(
                replace(struck, time=time.time(), seq=2, kind=EventKind.CHECKPOINT_FAILED, data={"reason": saves})
            )

    def _card(self, row: dict[str, Any]) -> Scorecard:
        events = sorted([*self._done, *map(self._with_node, self._follower.events)], key=lambda event: event.time)
        struck = max((event.attempt for event in events if event.kind == EventKind.DRILL), default=0)
        ended = _find_attempt(self._run, struck) if struck < row["attempts"] or is_over(row) else None
        # The controller has the last step, which a full disk may have kept out of the files.
        newest = [{"attempt": struck, "generation": 0, "step": ended.last_step}] if ended and ended.last_step else []
        failure = ended.failure if ended else None
        running_for = SETTLED if self._command else None
        about = {"state": row["state"], "failure": failure, "now": time.time(), "running_for": running_for}
        return score(self._kind, events, [*self._steps.read(), *newest], **about)

    def _with_node(self, event: Event) -> Event:
        """Return a node fault's event with the node's name in place of its index in the job."""
        at = event.data.get("rank")
        if event.kind != EventKind.DRILL or event.data.get("kind") not in NODE_KINDS or at is None:
            return event
        name = self._nodes[at] if at < len(self._nodes) else None
        return replace(event, data={"node": name, **event.data, "rank": None})


def _last_saved_step(row: dict[str, Any]) -> int:
    last = row["last_checkpoint"]
    return int(last["step"]) if last is not None else 0


def _find_attempt(run: str, attempt: int) -> Attempt | None:
    """Return the controller's record of an attempt, which may have died without an outcome."""
    with open_store(readonly=True) as store:
        return next((one for one in store.attempts(run) if one.number == attempt), None)
