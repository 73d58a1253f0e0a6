"""Events, one JSON line each. The coordinator, each agent, and the ranks of each node have their own files."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line
from trainer.protocol.logs.line_file import LineFile, Lines, read_new_lines


class EventKind(StrEnum):
    """Event kinds that a job may write. The comments list the keys in `data`."""

    ATTEMPT_STARTED = "attempt.started"  # job_id, nodes [names], world, began (start time of its first process)
    AGENT_JOINED = "agent.joined"  # node (index), name
    AGENT_LOST = "agent.lost"  # node, name, reason
    PREFLIGHT = "preflight"  # node, name, ok, reason; for all nodes together: ok, reason, speeds
    # node, name, variables {name: value}, staged (folder or null), reused, seconds
    NODE_PREPARED = "node.prepared"
    RANKS_BOUND = "ranks.bound"  # node, name, reason, cores {rank: "0-3,8"}: empty if not bound
    # instrumented (bool), frameworks [names], reason (why it is not): how a command is watched, on the first node
    PROGRAM_WATCHED = "program.watched"
    FORK_SERVER = "fork_server"  # node, warm (bool), reason, seconds: the server is ready, or has died
    CODE_RECORDED = "code.recorded"  # digest of the user's training code; code.json lists its files
    CODE_CHANGED = (
        "code.changed"  # digest, reason, files {name: digest}, packages {name: version} that differ from
        # the code that was submitted or trained last
    )
    GENERATION_STARTED = "generation.started"  # world, nodes
    # step, seconds (since generation.started) (, held {parameters, gradients, optimizer: bytes of rank 0; on_host})
    GENERATION_FIRST_STEP = "generation.first_step"
    GENERATION_ENDED = "generation.ended"  # reason, step, failure (Failure.to_json or null)
    RANK_EXITED = "rank.exited"  # rank, node, exit_code, signal, reason
    DECISION = "decision"  # action, reason
    # name, kind, rank, node, phase, step, reason, waiting [ranks], evidence (path), detected (s);
    # culprits [{rank, node, kind, reason}]: all root causes; chain: which rank waits for which; withdrawn (bool: ranks
    # moved again) (, observed: nothing was killed, because of watch.action)
    INCIDENT = "incident"
    STRAGGLER = "straggler"  # rank, node, section, ratio, step, steps, gpu_hours, over (bool: back to normal speed)
    BATCH_SKIPPED = "batch.skipped"  # step, position, reason: skipped from now on
    # step, restored (step of the checkpoint), reason: a step trained again after a restart gave a different result
    RESTART_DIFFERS = "restart.differs"
    LOSS_LEVEL = "loss.level"  # step, reason: consecutive spikes accepted as the new loss level
    SPARE_USED = "spare.used"  # node (index), name, instead (name of the lost node), reason, kind (of failure)(, drill)
    DRILL = "drill"  # kind, rank (None: a whole node), step (None: unknown) (, node)
    VALIDATED = "validated"  # step, seconds, metrics {name: number}
    STOP_REQUESTED = "stop.requested"  # reason
    STOP_AGREED = "stop.agreed"  # step, reason
    REQUEST_ANSWERED = "request.answered"  # name, answer
    CHECKPOINT_SAVING = "checkpoint.saving"  # step, name
    CHECKPOINT_COMMITTED = "checkpoint.committed"  # step, name, bytes, manifest (digest), seconds, stall (s)
    CHECKPOINT_FAILED = "checkpoint.failed"  # step, reason (, bytes: size of the failed checkpoint) (, tier)
    CHECKPOINT_REFUSED = "checkpoint.refused"  # step, name, reason, damaged (bool: its bytes are) (, tier)
    CHECKPOINT_RESTORED = "checkpoint.restored"  # step, name, seconds, tier (`memory` or the tier's path)
    CHECKPOINT_INCOMPLETE = "checkpoint.incomplete"  # step, reason: training changes state that is not in checkpoints
    CHECKPOINT_SOFTWARE = "checkpoint.software"  # step, changes {name: [before, now]}, ranks {name: rank} if not 0
    CHECKPOINT_DELETED = "checkpoint.deleted"  # step, name (, tier)
    CHECKPOINT_SKIPPED = "checkpoint.skipped"  # step, reason: both copies are still being written
    CHECKPOINT_RETRIED = "checkpoint.retried"  # step, reason, bytes: the save failed and is retried
    CHECKPOINT_DOUBTED = "checkpoint.doubted"  # step, reason: saved, but its plausibility is in doubt
    CHECKPOINT_FLUSHED = "checkpoint.flushed"  # step, name, tier, bytes, seconds: copied to another tier
    CHECKPOINT_STUCK = "checkpoint.stuck"  # step, reason: a write does not finish; training continues
    CHECKPOINT_SUSPECT = "checkpoint.suspect"  # step, reason: the same failure twice soon after loading it
    CHECKPOINT_SEEN = (
        "checkpoint.seen"  # step, name, path, bytes, new (bool: of this attempt) (, was, damage, anew): of a command
    )
    CHECKPOINT_SET_ASIDE = (
        "checkpoint.set_aside"  # step, name, path (the new path), reason, damaged (bool), bytes: of a command
    )
    # step (0: unknown), seconds since the start, reason (what a failure would repeat), looked (where): of a command
    CHECKPOINT_MISSING = "checkpoint.missing"
    CHECKPOINT_SEALED = "checkpoint.sealed"  # step, name, path, bytes, files (number), seconds: of a command
    CHECKPOINT_VERIFIED = "checkpoint.verified"  # step, name, path, bytes, seconds: it matches its seal
    PROGRAM_SEPARATE = "program.separate"  # rank, nodes, reason: each node of a program trains its own model
    PROGRAM_RESTORED = "program.restored"  # path, agree, differ (ranks), reason: parameters before the first step
    CHECKPOINT_CADENCE = "checkpoint.cadence"  # steps, seconds, reason: new interval between saves
    RESTORE_TESTED = "restore.tested"  # verdict, reason, evidence: result of a restore-test run
    ATTEMPT_ENDED = "attempt.ended"  # result, reason


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of an event file. `time` is in seconds since the epoch on the writer's clock."""

    time: float
    source: str
    seq: int
    kind: str
    attempt: int
    generation: int
    data: dict[str, Any] = field(default_factory=dict)


_KEYS = frozenset(each.name for each in fields(Event))


class EventLog:
    """Writer that appends one process's events to a file, which other processes on the same host may share."""

    def __init__(
        self, path: Path, source: str, attempt: int, *, clock: Callable[[], float] = time.time,
        lines: Lines | None = None,
    ) -> None:  # fmt: skip
        """If `lines` is given, it receives the lines instead of the file."""
        self._lines = LineFile(path) if lines is None else lines
        self._source, self._attempt, self._clock, self._seq = source, attempt, clock, 0
        self._lock = threading.Lock()
        self.generation = 0

    def write(self, kind: EventKind, /, **data: Any) -> None:
        """Append one event, stamped with this process's clock and the current generation. Raises OSError."""
        with self._lock:  # the checkpoint thread writes too
            self._seq += 1
            line = {
                "time": self._clock(),
                "source": self._source,
                "seq": self._seq,
                "kind": str(kind),
                "attempt": self._attempt,
                "generation": self.generation,
                "data": data,
            }
            self._lines.append(dump_line(line))

    def close(self) -> None:
        self._lines.close()


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the events in complete lines from byte `offset` on, and the offset for the next call.

    Lines that are not events are skipped. Such lines occur if a process is killed while writing.
    """
    lines, offset = read_new_lines(path, offset)
    return [event for line in lines if (event := _parse(line)) is not None], offset


def _parse(line: bytes) -> Event | None:
    try:
        fields = json.loads(line)
        event = Event(**{key: value for key, value in fields.items() if key in _KEYS})  # newer versions may add keys
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    numbers = (event.time, event.seq, event.attempt, event.generation)
    sound = all(isinstance(each, (int, float)) for each in numbers) and isinstance(event.kind, str)
    return event if sound and isinstance(event.data, dict) else None
