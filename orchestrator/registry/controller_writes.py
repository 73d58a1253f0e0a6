"""Registry writes of the controller, including leases. Each write checks its fencing epoch."""

import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import bindparam, select

from orchestrator.errors import Fenced, ForeignRun
from orchestrator.registry.database import check_changes, writes
from orchestrator.registry.records import (
    Attempt,
    Checkpoint,
    CheckpointCopy,
    EventCursor,
    Generation,
    Lease,
    Node,
    Notice,
    RestoreTest,
    Run,
    Submission,
    UserRequest,
)
from orchestrator.registry.tables import TABLES, replacement
from orchestrator.registry.user_writes import UserWrites
from orchestrator.states import AttemptState, RunState, Trust, may_move

NO_HOLDER = ""
"""Holder of a dropped lease."""
ALL_RUNS = ""
"""Scheduler of a lease for all runs, used by `orch db rebuild`."""
_SCHEDULER_OF = select(TABLES[Run].c.scheduler).where(TABLES[Run].c.name == bindparam("run"))


class ControllerWrites(UserWrites):
    """Writes of the lease's holder. All are idempotent."""

    @writes
    def take_lease(
        self,
        holder: str,
        now: float,
        ttl: float,
        scheduler: str = ALL_RUNS,
        over: Sequence[Lease] | None = None,
    ) -> Lease | None:
        """Return the lease if it is free, expired or already this holder's; None while another holder is alive.

        `over` lists leases that the caller has watched for long enough to know that their holders have stalled,
        whatever this host's clock shows. If it is given, only these leases count as expired, and only if they are
        unchanged. A new holder gets a higher epoch than all others, which fences its predecessor. The lease for all
        runs and a single scheduler's lease are mutually exclusive.
        """
        assert holder, "a lease needs a holder"
        rows = self.leases()
        others = [row for row in rows if scheduler in (ALL_RUNS, row.scheduler) or row.scheduler == ALL_RUNS]
        if any(is_live(row, now, over) for row in others if row.holder not in (NO_HOLDER, holder)):
            return None
        held = next((row for row in others if row.scheduler == scheduler), None)
        for row in others:
            if row is not held:
                self._set_lease(row.epoch, holder=NO_HOLDER, expires_at=0.0)
        next_epoch = max((row.epoch for row in rows), default=0) + 1
        if held is None:
            taken = Lease(epoch=next_epoch, holder=holder, renewed_at=now, expires_at=now + ttl, scheduler=scheduler)
            self.database.put(taken)
            return taken
        epoch = held.epoch if held.holder == holder else next_epoch
        self._set_lease(held.epoch, epoch=epoch, holder=holder, renewed_at=now, expires_at=now + ttl)
        return self._find_lease(epoch)

    @writes
    def renew_lease(self, lease: Lease, now: float, ttl: float) -> Lease:
        """Extend the lease by `ttl` seconds. Raises Fenced if it is lost."""
        self._fence(lease.epoch)
        self._set_lease(lease.epoch, renewed_at=now, expires_at=now + ttl)
        renewed = self._find_lease(lease.epoch)
        assert renewed is not None
        return renewed

    @writes
    def drop_lease(self, lease: Lease) -> None:
        """Give up the lease, unless another controller has taken it."""
        held = self._find_lease(lease.epoch)
        if held is not None and held.holder == lease.holder:
            self._set_lease(lease.epoch, holder=NO_HOLDER, expires_at=0.0)

    @writes
    def note_tick(self, lease: Lease, now: float) -> None:
        """Record the end of a whole pass over the runs. Raises Fenced if the lease is lost."""
        self._fence(lease.epoch)
        self._set_lease(lease.epoch, ticked_at=now)

    @writes
    def move_run(self, /, run: str, to: RunState, reason: str, *, epoch: int, now: float, **changes: Any) -> None:
        """Change a run's state and record the reason; if the state is the same, only apply `changes`."""
        self._fence(epoch, run)
        before = self.named_run(run).state
        values = check_changes(Run, changes)
        values |= self._move(run, "run", run, before, to, reason, now)
        if values:
            self.database.update(Run, {"updated_at": now, **values}, name=run)

    @writes
    def move_attempt(
        self, /, run: str, number: int, to: AttemptState, reason: str, *, epoch: int, now: float, **changes: Any
    ) -> None:
        """Change an attempt's state and record the reason; if the state is the same, only apply `changes`."""
        self._fence(epoch, run)
        before = self.attempt(run, number).state
        values = check_changes(Attempt, changes)
        values |= self._move(run, "attempt", str(number), before, to, reason, now)
        if values:
            self.database.update(Attempt, values, run=run, number=number)

    def _move(
        self, run: str, kind: str, subject: str, before: StrEnum, to: StrEnum, reason: str, now: float
    ) -> dict[str, Any]:  # fmt: skip
        """Record a state change. Return the new state and reason, or nothing if the row is already in that state."""
        if before == to:
            return {}
        assert may_move(before, to), f"{kind} {run}/{subject} may not go from {before} to {to}"
        self.note_transition(run, kind, subject, before, to, reason, now)
        return {"state": to, "reason": reason}

    @writes
    def claim_run(self, run: str, scheduler: str, *, epoch: int, before: str = "") -> bool:
        """Assign a run of scheduler `before` (empty: none) to this scheduler; return whether the run now belongs to it.

        Attempts without a scheduler follow the run.
        """
        self._fence(epoch)
        row = self.named_run(run)
        if row.scheduler not in (before, scheduler):
            return False
        self.database.update(Run, {"scheduler": scheduler}, name=run)
        self.database.touch(run)  # its record contains the scheduler
        self.database.update(Attempt, {"scheduler": scheduler}, run=run, scheduler="")
        return True

    @writes
    def note_run(self, /, run: str, *, epoch: int, now: float, **changes: Any) -> None:
        """Change fields of a run other than its state."""
        self._fence(epoch, run)
        self.named_run(run)
        self.database.update(Run, {"updated_at": now, **check_changes(Run, changes)}, name=run)

    @writes
    def note_notified(self, run: str, notified: dict[str, Any], *, epoch: int) -> None:
        """Record the state of a run's notifications without changing the run's update time."""
        self._fence(epoch, run)
        self.database.update(Run, {"notified": notified}, name=run)
        self.database.touch(run)

    @writes
    def note_attempt(self, /, run: str, number: int, *, epoch: int, **changes: Any) -> None:
        """Change fields of an attempt other than its state."""
        self._fence(epoch, run)
        self.attempt(run, number)
        if changes:
            self.database.update(Attempt, check_changes(Attempt, changes), run=run, number=number)

    @writes
    def add_attempt(
        self, /, run: str, *, nonce: str, excluded: tuple[str, ...], epoch: int, now: float,
        reason: str = "next attempt", **changes: Any,
    ) -> Attempt:  # fmt: skip
        """Add the intent of the run's next attempt; `changes` override the fields taken from the run."""
        self._fence(epoch, run)
        number = max((attempt.number for attempt in self.attempts(run)), default=0) + 1
        self.put_intent(
            self.named_run(run), number, nonce=nonce, excluded=excluded, epoch=epoch, reason=reason, now=now
        )
        if changes:
            self.database.update(Attempt, check_changes(Attempt, changes), run=run, number=number)
        return self.attempt(run, number)

    @writes
    def put_generation(self, generation: Generation, *, epoch: int) -> None:
        """Insert or update a generation, and the attempt's count of generations."""
        self._fence(epoch, generation.run)
        self.database.execute(replacement(Generation, "run", "attempt", "number"), vars(generation))
        count = len(self.generations(generation.run, generation.attempt))
        self.database.update(Attempt, {"generations": count}, run=generation.run, number=generation.attempt)

    @writes
    def put_notice(self, notice: Notice, *, epoch: int) -> None:
        """Insert a notice; an existing one is kept."""
        self._fence(epoch, notice.run)
        self.database.put(notice, keep_existing=True)

    @writes
    def put_checkpoint(self, checkpoint: Checkpoint, *, epoch: int) -> None:
        """Insert a checkpoint; an existing one is kept."""
        self._fence(epoch, checkpoint.run)
        if self.database.put(checkpoint, keep_existing=True).rowcount:
            reason = checkpoint.reason or f"written by attempt {checkpoint.attempt}"
            self.note_transition(
                checkpoint.run, "checkpoint", checkpoint.name, "", checkpoint.trust, reason, checkpoint.committed_at
            )

    @writes
    def put_copy(self, copy: CheckpointCopy, *, epoch: int) -> None:
        """Record a copy of a known checkpoint in another tier."""
        self._fence(epoch, copy.run)
        self.checkpoint(copy.run, copy.name)
        self.database.put(copy, keep_existing=True)

    @writes
    def drop_copy(self, run: str, name: str, tier: str, *, epoch: int) -> None:
        """Delete the record of a copy."""
        self._fence(epoch, run)
        self.database.delete(CheckpointCopy, run=run, name=name, tier=tier)

    @writes
    def move_checkpoint(self, run: str, name: str, path: str, *, epoch: int) -> None:
        """Record a checkpoint's new path."""
        self._fence(epoch, run)
        self.database.update(Checkpoint, {"path": path, "tier": os.path.dirname(path)}, run=run, name=name)

    @writes
    def rehome(self, copy: CheckpointCopy, reason: str, *, epoch: int) -> None:
        """Make a copy the checkpoint's main location after the original is gone, without changing its trust."""
        self._fence(epoch, copy.run)
        self.checkpoint(copy.run, copy.name)
        place = {"tier": copy.tier, "path": copy.path, "reason": reason}
        self.database.update(Checkpoint, place, run=copy.run, name=copy.name)
        self.drop_copy(copy.run, copy.name, copy.tier, epoch=epoch)

    @writes
    def trust(self, run: str, name: str, to: Trust, reason: str, *, epoch: int, now: float) -> None:
        """Change a checkpoint's trust and record the reason."""
        self._fence(epoch, run)
        if moved := self._move(run, "checkpoint", name, self.checkpoint(run, name).trust, to, reason, now):
            self.database.update(Checkpoint, {"trust": moved.pop("state"), **moved}, run=run, name=name)

    @writes
    def end_restore_test(
        self, test: str, verdict: str, reason: str, evidence: dict[str, Any], *, epoch: int, now: float
    ) -> None:
        """Record the end of a restore test, as the tested run's controller. The first verdict is kept."""
        self._fence(epoch)
        found = self.restore_test(test)
        if found is not None and found.ended_at is None:
            values = {"verdict": verdict, "reason": reason, "evidence": evidence, "ended_at": now}
            self.database.update(RestoreTest, values, test=test)
        self.database.touch(test)

    @writes
    def saw_node(self, name: str, cluster: str, *, epoch: int, now: float, failure: str | None = None) -> None:
        """Count another attempt on a node or, with `failure`, a failure on it."""
        node = self._node(name, cluster, epoch, now)
        if failure is None:
            changes: dict[str, Any] = {"attempts": node.attempts + 1}
        else:
            # While a node is excluded, the reason for its exclusion is kept.
            reason = node.reason if node.excluded_until > now else failure
            changes = {"failures": node.failures + 1, "reason": reason}
        self._alter_node(node, now, changes)

    @writes
    def exclude_node(self, name: str, cluster: str, until: float, reason: str, *, epoch: int, now: float) -> None:
        """Exclude a node until a given time (`now` ends the exclusion) and record the reason."""
        node = self._node(name, cluster, epoch, now)
        self._alter_node(node, now, {"excluded_until": until, "reason": reason})

    @writes
    def prolong_exclusion(
        self, name: str, cluster: str, before: float, until: float, *, epoch: int, now: float
    ) -> None:  # fmt: skip
        """Extend a node's exclusion if it still ends at `before`."""
        self._fence(epoch)
        self.database.update(Node, {"excluded_until": until}, cluster=cluster, name=name, excluded_until=before)

    @writes
    def release_node(self, name: str, cluster: str, reason: str, *, epoch: int, now: float) -> None:
        """End a node's exclusion and reset its failures."""
        node = self._node(name, cluster, epoch, now)
        self._alter_node(node, now, {"excluded_until": now, "reason": reason, "failures": 0})

    @writes
    def add_submission(self, run: str, attempt: int, *, epoch: int, now: float) -> int:
        """Record that the attempt's job is about to be submitted; return the submission's number."""
        self._fence(epoch)
        numbers = [submission.number for submission in self.submissions(run) if submission.attempt == attempt]
        number = max(numbers, default=0) + 1
        self.database.put(Submission(run=run, attempt=attempt, number=number, submitted_at=now))
        return number

    @writes
    def note_submission(self, /, run: str, attempt: int, number: int, *, epoch: int, **changes: Any) -> None:
        """Record the outcome or job id of a submission."""
        self._fence(epoch)
        changes = check_changes(Submission, changes)
        self.database.update(Submission, changes, run=run, attempt=attempt, number=number)

    @writes
    def set_cursor(self, run: str, file: str, offset: int, *, epoch: int) -> None:
        """Record the offset up to which an event file has been read."""
        self._fence(epoch, run)
        self.database.execute(replacement(EventCursor, "run", "file"), {"run": run, "file": file, "offset": offset})

    @writes
    def answer(self, request_id: int, answer: str, *, epoch: int, now: float) -> None:
        """Answer a request. The first answer is kept."""
        found = next((request for request in self.user_requests() if request.id == request_id), None)
        self._fence(epoch, None if found is None else found.run)
        if found is not None:
            self.database.update(UserRequest, {"answer": answer, "answered_at": now}, id=request_id)

    def _fence(self, epoch: int, run: str | None = None) -> None:
        """Raise Fenced if the epoch's lease is not held, and ForeignRun if the run belongs to another scheduler.

        An expired lease is accepted until another controller takes it. This check and the write share a transaction.
        """
        held = self._find_lease(epoch)
        if held is None or held.holder == NO_HOLDER:
            live = [f"epoch {row.epoch} is in force" for row in self.leases() if row.holder != NO_HOLDER]
            why = ", ".join(live) or "no controller holds the lease"
            raise Fenced(f"a controller with epoch {epoch} may not write: {why}")
        if run is not None and held.scheduler != ALL_RUNS:
            for (owner,) in self.database.rows(_SCHEDULER_OF, {"run": run}):
                if owner not in ("", held.scheduler):
                    raise ForeignRun(f"the controller of {held.scheduler} may not write: {run} belongs to {owner}")

    def _find_lease(self, epoch: int) -> Lease | None:
        """Return the lease with this epoch, which is unique."""
        return self.database.first(Lease, epoch=epoch)

    def _set_lease(self, of_epoch: int, **changes: object) -> None:
        self.database.update(Lease, changes, epoch=of_epoch)

    def _node(self, name: str, cluster: str, epoch: int, now: float) -> Node:
        """Return a node's row, inserting it if the node is new."""
        self._fence(epoch)
        self.database.put(Node(name=name, cluster=cluster, first_seen=now, last_seen=now), keep_existing=True)
        found = self.database.first(Node, cluster=cluster, name=name)
        assert found is not None
        return found

    def _alter_node(self, node: Node, now: float, changes: Mapping[str, Any]) -> None:
        seen = {"last_seen": max(node.last_seen, now)}
        self.database.update(Node, {**seen, **changes}, cluster=node.cluster, name=node.name)


def is_live(held: Lease, now: float, over: Sequence[Lease] | None) -> bool:
    """Return whether a held lease excludes other controllers; `over` has the same meaning as in `take_lease`."""
    if over is None:
        return held.expires_at > now
    return (held.epoch, held.renewed_at) not in {(watched.epoch, watched.renewed_at) for watched in over}
