"""The registry's verbs over plain dictionaries: what the controller's simulations run on."""

import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.errors import Fenced, ForeignRun, NotFound
from orchestrator.registry.fast_queries import covering_lease
from orchestrator.registry.operations.controller_writes import is_live
from orchestrator.registry.records import (
    Attempt,
    Checkpoint,
    CheckpointCopy,
    Generation,
    Lease,
    NewRun,
    Node,
    Notice,
    RestoreTest,
    Run,
    Submission,
    Transition,
    UserRequest,
)
from orchestrator.states import AttemptState, RunState, Trust, may_move

T = TypeVar("T")


class MemoryStore:
    """Every verb is atomic, as a transaction is; it survives the controllers that use it."""

    path = Path("/memory/registry.db")

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._generations: dict[tuple[str, int, int], Generation] = {}
        self._checkpoints: dict[tuple[str, str], Checkpoint] = {}
        self._copies: dict[tuple[str, str, str], CheckpointCopy] = {}
        self._nodes: dict[tuple[str, str], Node] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        self._cursors: dict[tuple[str, str], int] = {}
        self._notices: dict[tuple[str, int, str, int], Notice] = {}
        self._submissions: dict[tuple[str, int, int], Submission] = {}
        self._user_requests: list[UserRequest] = []
        self._transitions: list[Transition] = []
        self._leases: dict[str, Lease] = {}

    def close(self) -> None:
        pass

    def together(self, work: Callable[[], T]) -> T:
        """All or nothing, as one transaction."""
        kept = {key: copy(value) for key, value in vars(self).items()}
        try:
            return work()
        except BaseException:
            vars(self).update(kept)
            raise

    def run(self, name: str) -> Run:
        if name not in self._runs:
            raise NotFound(f"no run {name}")
        return self._runs[name]

    def runs(self, states: Any = None, limit: int | None = None) -> list[Run]:
        return [run for run in reversed(self._runs.values()) if states is None or run.state in states][:limit]

    def attempts(self, run: str) -> list[Attempt]:
        return [attempt for (name, _), attempt in sorted(self._attempts.items()) if name == run]

    def attempt(self, run: str, n: int) -> Attempt:
        if (run, n) not in self._attempts:
            raise NotFound(f"no attempt {run}/{n}")
        return self._attempts[run, n]

    def generations(self, run: str, attempt: int | None = None) -> list[Generation]:
        return [g for (name, n, _), g in sorted(self._generations.items()) if name == run and attempt in (None, n)]

    def checkpoints(self, run: str) -> list[Checkpoint]:
        mine = [item for (name, _), item in self._checkpoints.items() if name == run]
        return sorted(mine, key=lambda item: (item.step, item.name), reverse=True)

    def copies(self, run: str) -> list[CheckpointCopy]:
        return [item for (name, _, _), item in sorted(self._copies.items()) if name == run]

    def restore_tests(self, run: str) -> list[RestoreTest]:
        return []

    def history(self, cluster: str, since: float) -> tuple[list[Attempt], list[Generation]]:
        mine = {name for name, run in self._runs.items() if run.domain == cluster}
        lived = [item for item in self._attempts.values() if item.run in mine and item.started_at is not None]
        fallen = [item for item in self._generations.values() if item.run in mine and item.failure is not None]
        return (
            [item for item in lived if item.ended_at is None or item.ended_at >= since],
            [item for item in fallen if item.started_at >= since],
        )

    def submissions(self, run: str | None = None, *, since: float = 0.0) -> list[Submission]:
        found = (item for item in self._submissions.values() if run in (None, item.run) and item.submitted_at >= since)
        return sorted(found, key=lambda item: (item.submitted_at, item.run, item.attempt, item.number))

    def add_submission(self, run: str, attempt: int, *, epoch: int, now: float) -> int:
        self._check(epoch)
        number = sum(key[:2] == (run, attempt) for key in self._submissions) + 1
        made = Submission(run=run, attempt=attempt, number=number, submitted_at=now)
        self._submissions[run, attempt, number] = made
        return number

    def note_submission(self, run: str, attempt: int, number: int, *, epoch: int, **changes: Any) -> None:
        self._check(epoch)
        self._submissions[run, attempt, number] = replace(self._submissions[run, attempt, number], **changes)

    def transitions(self, run: str) -> list[Transition]:
        return [item for item in self._transitions if item.run == run]

    def notices(self, run: str) -> list[Notice]:
        return sorted((item for item in self._notices.values() if item.run == run), key=lambda item: item.time)

    def cluster_notices(self, cluster: str, kinds: Any, since: float) -> list[Notice]:
        here = {name for name, run in self._runs.items() if run.domain == cluster}
        found = [item for item in self._notices.values() if item.run in here and item.kind in kinds]
        return sorted((item for item in found if item.time >= since), key=lambda item: item.time)

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def config(self, digest: str) -> dict[str, Any]:
        if digest not in self._configs:
            raise NotFound(f"no config {digest}")
        return self._configs[digest]

    def leases(self) -> list[Lease]:
        return sorted(self._leases.values(), key=lambda lease: (not lease.holder, -lease.renewed_at, -lease.epoch))

    def lease(self, scheduler: str | None = None) -> Lease | None:
        return next(iter(self.leases()), None) if scheduler is None else covering_lease(self.leases(), scheduler)

    def user_requests(self, pending: bool = True) -> list[UserRequest]:
        return [ask for ask in self._user_requests if not pending or ask.answered_at is None]

    def cursor(self, run: str, file: str) -> int:
        return self._cursors.get((run, file), 0)

    def put_config(self, data: dict[str, Any]) -> str:
        digest = f"{len(self._configs):064x}"
        self._configs[digest] = data
        return digest

    def create_run(self, new: NewRun, *, now: float, nonce: str) -> tuple[Run, Attempt]:
        name = f"{new.slug}-{len(self._runs) + 1}"
        self._runs[name] = Run(
            name=name, state=RunState.CREATED, reason="", cluster=new.cluster, run_dir=str(new.root / name),
            config_digest=new.config_digest, total_steps=new.total_steps, created_at=now, updated_at=now,
            identity=new.identity, scheduler=new.scheduler,
        )  # fmt: skip
        return self._runs[name], self._intent(name, 1, nonce, (), 0, now)

    def _intent(
        self, run: str, n: int, nonce: str, excluded: tuple[str, ...], epoch: int, now: float,
        reason: str = "first attempt",
    ) -> Attempt:  # fmt: skip
        self._attempts[run, n] = Attempt(
            run=run, number=n, state=AttemptState.INTENT, nonce=nonce, job_name=f"orch-{run}-{n}-{nonce}",
            epoch=epoch, excluded=excluded, intent_at=now, scheduler=self._runs[run].scheduler,
            config_digest=self._runs[run].config_digest,
        )  # fmt: skip
        self._transitions.append(
            Transition(
                run=run, kind="attempt", subject=str(n), before="", after=AttemptState.INTENT, reason=reason, time=now
            )  # fmt: skip
        )
        return self._attempts[run, n]

    def add_user_request(self, run: str, verb: str, args: dict[str, Any], now: float) -> int:
        self._user_requests.append(
            UserRequest(id=len(self._user_requests) + 1, run=run, verb=verb, args=args, asked_at=now)
        )
        return len(self._user_requests)

    def take_lease(
        self, holder: str, now: float, ttl: float, scheduler: str = "", over: Sequence[Lease] | None = None
    ) -> Lease | None:
        rivals = [row for key, row in self._leases.items() if scheduler in ("", key) or not key]
        if any(is_live(row, now, over) for row in rivals if row.holder not in ("", holder)):
            return None
        self._leases |= {row.scheduler: replace(row, holder="", expires_at=0.0) for row in rivals}
        held = next((row for row in rivals if row.scheduler == scheduler), None)
        own = held is not None and held.holder == holder
        epoch = held.epoch if held and own else max((row.epoch for row in self._leases.values()), default=0) + 1
        lease = Lease(epoch=epoch, holder=holder, renewed_at=now, expires_at=now + ttl, scheduler=scheduler)
        self._leases[scheduler] = lease
        return lease

    def renew_lease(self, lease: Lease, now: float, ttl: float) -> Lease:
        held = self._check(lease.epoch)
        self._leases[held.scheduler] = replace(held, renewed_at=now, expires_at=now + ttl)
        return self._leases[held.scheduler]

    def drop_lease(self, lease: Lease) -> None:
        for held in self.leases():
            if held.epoch == lease.epoch:
                self._leases[held.scheduler] = replace(held, holder="", expires_at=0.0)

    def note_tick(self, lease: Lease, now: float) -> None:
        held = self._check(lease.epoch)
        self._leases[held.scheduler] = replace(held, ticked_at=now)

    def _check(self, epoch: int, run: str | None = None) -> Lease:
        held = next((row for row in self._leases.values() if row.epoch == epoch and row.holder), None)
        if held is None:
            raise Fenced("another controller holds the lease")
        owner = self._runs[run].scheduler if run in self._runs else ""
        if held.scheduler and owner not in ("", held.scheduler):
            raise ForeignRun(f"the controller of {held.scheduler} may not write: {run} belongs to {owner}")
        return held

    def claim_run(self, run: str, scheduler: str, *, epoch: int, before: str = "") -> bool:
        self._check(epoch)
        if self._runs[run].scheduler not in (before, scheduler):
            return False
        if not self._runs[run].scheduler:
            self._keep_nodes(self._runs[run].cluster, scheduler)
        self._runs[run] = replace(self._runs[run], scheduler=scheduler)
        for key, row in self._attempts.items():
            if row.run == run and not row.scheduler:
                self._attempts[key] = replace(row, scheduler=scheduler)
        return True

    def _keep_nodes(self, old: str, new: str) -> None:
        for node in [node for node in self._nodes.values() if node.cluster == old]:
            known = self._nodes.get((new, node.name))
            if known is None:
                self._nodes[new, node.name] = replace(node, cluster=new)
            elif node.excluded_until > known.excluded_until:
                later = {"excluded_until": node.excluded_until, "reason": node.reason}
                self._nodes[new, node.name] = replace(known, **later)

    def _moved(self, run: str, kind: str, subject: str, before: Any, to: Any, reason: str, now: float) -> None:
        assert may_move(before, to), f"{kind} {subject}: {before} -> {to} ({reason})"
        self._transitions.append(
            Transition(run=run, kind=kind, subject=subject, before=before, after=to, reason=reason, time=now)
        )

    def move_run(self, run: str, to: RunState, reason: str, *, epoch: int, now: float, **changes: Any) -> None:
        self._check(epoch, run)
        row = self._runs[run]
        if row.state is not to:
            self._moved(run, "run", run, row.state, to, reason, now)
            changes = {"reason": reason, **changes}
        self._runs[run] = replace(row, state=to, updated_at=now, **changes)

    def move_attempt(
        self, run: str, n: int, to: AttemptState, reason: str, *, epoch: int, now: float, **changes: Any
    ) -> None:
        self._check(epoch, run)
        row = self._attempts[run, n]
        if row.state is not to:
            self._moved(run, "attempt", str(n), row.state, to, reason, now)
            changes = {"reason": reason, **changes}
        self._attempts[run, n] = replace(row, state=to, **changes)

    def note_attempt(self, run: str, n: int, *, epoch: int, **changes: Any) -> None:
        self._check(epoch, run)
        self._attempts[run, n] = replace(self._attempts[run, n], **changes)

    def note_run(self, run: str, *, epoch: int, now: float, **changes: Any) -> None:
        self._check(epoch, run)
        self._runs[run] = replace(self._runs[run], updated_at=now, **changes)

    def add_attempt(
        self, run: str, *, nonce: str, excluded: tuple[str, ...], epoch: int, now: float,
        reason: str = "next attempt", **changes: Any,
    ) -> Attempt:  # fmt: skip
        self._check(epoch, run)
        number = len(self.attempts(run)) + 1
        made = replace(self._intent(run, number, nonce, excluded, epoch, now, reason), **changes)
        self._attempts[run, number] = made
        return made

    def put_generation(self, generation: Generation, *, epoch: int) -> None:
        self._check(epoch, generation.run)
        self._generations[generation.run, generation.attempt, generation.number] = generation

    def put_notice(self, notice: Notice, *, epoch: int) -> None:
        self._check(epoch, notice.run)
        self._notices.setdefault((notice.run, notice.attempt, notice.source, notice.seq), notice)

    def put_checkpoint(self, checkpoint: Checkpoint, *, epoch: int) -> None:
        self._check(epoch, checkpoint.run)
        self._checkpoints.setdefault((checkpoint.run, checkpoint.name), checkpoint)

    def put_copy(self, copy: CheckpointCopy, *, epoch: int) -> None:
        self._check(epoch, copy.run)
        self._copies.setdefault((copy.run, copy.name, copy.tier), copy)

    def drop_copy(self, run: str, name: str, tier: str, *, epoch: int) -> None:
        self._check(epoch, run)
        self._copies.pop((run, name, tier), None)

    def move_checkpoint(self, run: str, name: str, path: str, *, epoch: int) -> None:
        self._check(epoch, run)
        row = self._checkpoints[run, name]
        self._checkpoints[run, name] = replace(row, path=path, tier=os.path.dirname(path))

    def rehome(self, copy: CheckpointCopy, reason: str, *, epoch: int) -> None:
        self._check(epoch, copy.run)
        key = (copy.run, copy.name)
        self._checkpoints[key] = replace(self._checkpoints[key], tier=copy.tier, path=copy.path, reason=reason)
        del self._copies[copy.run, copy.name, copy.tier]

    def trust(self, run: str, name: str, to: Trust, reason: str, *, epoch: int, now: float) -> None:
        self._check(epoch, run)
        row = self._checkpoints[run, name]
        if row.trust is to:
            return
        self._moved(run, "checkpoint", name, row.trust, to, reason, now)
        self._checkpoints[run, name] = replace(row, trust=to, reason=reason)

    def saw_node(self, name: str, cluster: str, *, epoch: int, now: float, failure: str | None = None) -> None:
        self._check(epoch)
        row = self._node(name, cluster, now)
        failed = failure is not None
        self._nodes[cluster, name] = replace(
            row, attempts=row.attempts + (not failed), failures=row.failures + failed,
            reason=row.reason if failure is None or row.excluded_until > now else failure,
        )  # fmt: skip

    def exclude_node(self, name: str, cluster: str, until: float, reason: str, *, epoch: int, now: float) -> None:
        self._check(epoch)
        self._nodes[cluster, name] = replace(self._node(name, cluster, now), excluded_until=until, reason=reason)

    def release_node(self, name: str, cluster: str, reason: str, *, epoch: int, now: float) -> None:
        self.exclude_node(name, cluster, now, reason, epoch=epoch, now=now)
        self._nodes[cluster, name] = replace(self._nodes[cluster, name], failures=0)

    def _node(self, name: str, cluster: str, now: float) -> Node:
        row = self._nodes.get((cluster, name)) or Node(name=name, cluster=cluster, first_seen=now, last_seen=now)
        return replace(row, last_seen=now)

    def set_cursor(self, run: str, file: str, offset: int, *, epoch: int) -> None:
        self._check(epoch, run)
        self._cursors[run, file] = offset

    def answer(self, request_id: int, answer: str, *, epoch: int, now: float) -> None:
        self._check(epoch, self._user_requests[request_id - 1].run)
        self._user_requests[request_id - 1] = replace(
            self._user_requests[request_id - 1], answered_at=now, answer=answer
        )
