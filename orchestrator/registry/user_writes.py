"""Registry writes of users: configs, new runs, requests to the controller, and removal of runs."""

import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import Integer, cast, func, select

from checkpointing.storage.durable import canonical
from orchestrator.errors import Precondition
from orchestrator.registry.database import writes
from orchestrator.registry.reads import Reads
from orchestrator.registry.records import Attempt, ConfigText, NewRun, RestoreTest, Run, Transition, UserRequest
from orchestrator.registry.tables import TABLES, field_names, insertion
from orchestrator.states import ENDED_RUNS, LIVE_ATTEMPTS, LIVE_RUNS, AttemptState, RunState


class Removal(StrEnum):
    """Progress of a run's removal."""

    NONE = ""
    BEGUN = "begun"  # the run can no longer be resumed or tested
    SET_ASIDE = "set aside"  # its folder has been renamed, and its remaining files are under the new name


class UserWrites(Reads):
    """Writes that need no lease: they decide nothing, or change an ended run, which has no controller."""

    @writes
    def put_config(self, data: dict[str, Any]) -> str:
        """Store a resolved config once; return the digest of its canonical bytes."""
        content = canonical(data)
        digest = hashlib.sha256(content).hexdigest()
        self.database.put(ConfigText(digest=digest, data=content.decode()), keep_existing=True)
        return digest

    @writes
    def put_restore_test(self, test: RestoreTest) -> None:
        """Record that a run is a restore test, in the same transaction as its `create_run`.

        Raises Precondition for a test of a run that is being removed.
        """
        if self.named_run(test.run).removal:
            raise Precondition(f"{test.run} is being removed", where=test.run, hint=f"orch rm {test.run}")
        self.database.put(test)

    def free_name(self, slug: str, root: Path) -> str:
        """Return the name of the next run with this slug."""
        # The range uses an index ("." follows "-"). A name without a number at its end has another slug.
        name = TABLES[Run].c.name
        tail = func.substr(name, len(slug) + 2)
        own = name.between(f"{slug}-", f"{slug}.") & (tail != "") & ~tail.op("GLOB")("*[^0-9]*")
        ((newest,),) = self.database.rows(select(func.max(cast(tail, Integer))).where(own))
        number = (newest or 0) + 1
        while (root / f"{slug}-{number}").exists():
            number += 1
        return f"{slug}-{number}"

    @writes
    def create_run(self, new: NewRun, *, now: float, nonce: str) -> tuple[Run, Attempt]:
        """Create a run `<slug>-<n>` (CREATED) with the intent of its first attempt.

        `n` is one more than the slug's highest number in this registry. Numbers whose folders already exist in the root
        are skipped, so that a lost registry or a second user of the root never causes a duplicate name. Raises
        Precondition if the sweep already has a run with the same values.
        """
        for run in self.sweep_runs(new.sweep.get("name", "")):
            if run.sweep["point"] == new.sweep["point"]:
                what = f"{run.name} already has these values in the sweep {new.sweep['name']}"
                raise Precondition(what, where=run.name, hint=f"orch status --sweep {new.sweep['name']}")
        name = self.free_name(new.slug, new.root)
        run = Run(
            name=name, state=RunState.CREATED, reason="", cluster=new.cluster, run_dir=str(new.root / name),
            config_digest=new.config_digest, total_steps=new.total_steps, created_at=now, updated_at=now,
            identity=new.identity, scheduler=new.scheduler, tags=new.tags, predecessor=new.predecessor,
            predecessor_created_at=new.predecessor_created_at, sweep=new.sweep,
        )  # fmt: skip
        self.database.put(run)
        self.note_transition(name, "run", name, "", RunState.CREATED, "submitted", now)
        self.put_intent(run, 1, nonce=nonce, excluded=(), epoch=0, reason="first attempt", now=now)
        return self.named_run(name), self.attempt(name, 1)

    @writes
    def change_tags(self, run: str, added: Iterable[str], removed: Iterable[str]) -> tuple[str, ...]:
        """Add and remove tags of a run; return its tags."""
        tags = tuple(sorted(({*self.named_run(run).tags} | {*added}) - {*removed}))
        self.database.update(Run, {"tags": tags}, name=run)
        self.database.touch(run)  # its record contains the tags too
        return tags

    @writes
    def set_sweep_limit(self, name: str, limit: int) -> None:
        """Change how many unfinished runs of a sweep there may be at once."""
        for run in self.sweep_runs(name):
            self.database.update(Run, {"sweep": {**run.sweep, "limit": limit}}, name=run.name)
            self.database.touch(run.name)  # its record contains the limit too

    @writes
    def add_user_request(self, run: str, verb: str, args: dict[str, Any], now: float) -> int:
        """Add a request to the controller; return the number under which it will be answered."""
        self.named_run(run)
        row = {"run": run, "verb": verb, "args": args, "asked_at": now, "answer": ""}
        return self.database.execute(insertion(UserRequest), row).lastrowid or 0

    @writes
    def begin_removal(self, run: str) -> None:
        """Mark the run as being removed, which stops new work on it. Raises Precondition if it is in use."""
        found = self.named_run(run)
        under_way = [test.test for test in self.restore_tests(run, going_on=True)]
        require_removable(found, self.attempts(run), under_way)
        if not found.removal:
            reason = f"is being removed; to finish: orch rm {run}"
            self.database.update(Run, {"removal": Removal.BEGUN, "reason": reason}, name=run)

    @writes
    def note_set_aside(self, run: str) -> None:
        """Record that a run's folder was renamed, so that it counts as gone, not hidden."""
        self.database.update(Run, {"removal": Removal.SET_ASIDE}, name=run)

    @writes
    def delete_run(self, run: str) -> None:
        """Delete every row of a run whose removal has begun."""
        assert self.named_run(run).removal, f"the removal of {run} was not begun"
        self.database.delete(RestoreTest, test=run)
        for kind in reversed(TABLES):  # referring tables first
            if "run" in field_names(kind) and kind is not RestoreTest:
                self.database.delete(kind, run=run)
        self.database.delete(Run, name=run)

    def put_intent(
        self, run: Run, number: int, *, nonce: str, excluded: tuple[str, ...], epoch: int, reason: str, now: float
    ) -> None:  # fmt: skip
        """Record, within a write, that attempt `number` is about to be submitted to its run's scheduler."""
        self.database.put(
            Attempt(
                run=run.name, number=number, state=AttemptState.INTENT, nonce=nonce,
                job_name=f"orch-{run.name}-{number}-{nonce}", epoch=epoch, excluded=excluded, intent_at=now,
                scheduler=run.scheduler, config_digest=run.config_digest,
            )
        )  # fmt: skip
        self.note_transition(run.name, "attempt", str(number), "", AttemptState.INTENT, reason, now)

    def note_transition(
        self, run: str, kind: str, subject: str, before: str, after: str, reason: str, time: float
    ) -> None:  # fmt: skip
        """Record, within a write, a state change with its reason. The run's record file is updated after the commit."""
        self.database.touch(run)
        self.database.put(
            Transition(run=run, kind=kind, subject=subject, before=before, after=after, reason=reason, time=time)
        )


def require_removable(run: Run, attempts: Sequence[Attempt], tests: Sequence[str]) -> None:
    """Raise Precondition if a run is or may be alive, or if `tests` of it are in progress."""
    # A LOST attempt of an ended run never comes back.
    lost = attempts[-1].state is AttemptState.LOST and run.state not in ENDED_RUNS
    if run.state in LIVE_RUNS or lost or any(attempt.state in LIVE_ATTEMPTS for attempt in attempts):
        raise Precondition(
            f"{run.name} is {run.state}" + ("" if run.state in LIVE_RUNS else ", and its last job may still be alive"),
            where=run.reason,
            hint=f"`orch cancel {run.name}` stops it; then try again",
        )
    if tests:
        raise Precondition(
            f"a restore test of {run.name} is under way: {tests[0]}",
            where=run.name,
            hint=f"`orch wait {tests[0]}`, or `orch cancel {tests[0]}`; then try again",
        )
