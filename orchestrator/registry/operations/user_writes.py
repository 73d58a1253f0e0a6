"""Registry writes of users: configs, new runs, requests to the controller."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Integer, cast, func, insert, select

from checkpointing.storage.durable import canonical
from orchestrator.errors import Precondition
from orchestrator.registry.database import StoreOperations, reads, writes
from orchestrator.registry.models import AttemptRow, ConfigRow, RestoreTestRow, RunRow, UserRequestRow
from orchestrator.registry.records import Attempt, NewRun, RestoreTest, Run
from orchestrator.registry.rows import TOUCHED, alter_run, insertion, note_transition, the_attempt, the_run
from orchestrator.states import AttemptState, RunState


class UserWrites(StoreOperations):
    """Writes that need no lease because they decide nothing."""

    @writes
    def put_config(self, connection: Connection, data: dict[str, Any]) -> str:
        """Store a resolved config once; return the digest of its canonical bytes."""
        content = canonical(data)
        digest = hashlib.sha256(content).hexdigest()
        connection.execute(insertion(ConfigRow, kept=True), {"digest": digest, "data": content.decode()})
        return digest

    @writes
    def put_restore_test(self, connection: Connection, test: RestoreTest) -> None:
        """Record that a run is a restore test, in one transaction with its `create_run`.

        Raises Precondition for a test of a run that is being removed.
        """
        if the_run(connection, test.run).removal:
            raise Precondition(f"{test.run} is being removed", where=test.run, hint=f"orch rm {test.run}")
        connection.execute(insertion(RestoreTestRow), dict(test.__dict__))

    @reads
    def free_name(self, connection: Connection, slug: str, root: Path) -> str:
        """Return the name of the next run with this slug."""
        return _free_name(connection, slug, root)

    @writes
    def create_run(self, connection: Connection, new: NewRun, *, now: float, nonce: str) -> tuple[Run, Attempt]:
        """Create a run `<slug>-<n>` (CREATED) with the intent of its first attempt.

        `n` is one more than the highest number of that slug here, and skips existing folders in its root, so that a
        lost registry or a second user of the same root never causes a duplicate name.
        """
        name = _free_name(connection, new.slug, new.root)
        values = {
            "name": name,
            "state": RunState.CREATED,
            "reason": "",
            "cluster": new.cluster,
            "run_dir": str(new.root / name),
            "config_digest": new.config_digest,
            "total_steps": new.total_steps,
            "step": 0,
            "not_before": 0.0,
            "fresh_from": 1,
            "created_at": now,
            "updated_at": now,
            "identity": new.identity,
            "scheduler": new.scheduler,
            "tags": new.tags,
            "notified": {},
            "removal": "",
        }
        connection.execute(insertion(RunRow), values)
        note_transition(connection, name, "run", name, "", RunState.CREATED, "submitted", now)
        put_intent(connection, name, 1, nonce=nonce, excluded=(), epoch=0, reason="first attempt", now=now)
        return the_run(connection, name), the_attempt(connection, name, 1)

    @writes
    def change_tags(
        self, connection: Connection, run: str, added: Iterable[str], removed: Iterable[str]
    ) -> tuple[str, ...]:
        """Add and remove tags of a run; return its tags."""
        now = tuple(sorted(({*the_run(connection, run).tags} | {*added}) - {*removed}))
        alter_run(connection, run, tags=now)
        connection.info.setdefault(TOUCHED, set()).add(run)  # its record contains them too
        return now

    @writes
    def add_user_request(self, connection: Connection, run: str, verb: str, args: dict[str, Any], now: float) -> int:
        """Add a request to the controller; return the number under which it will be answered."""
        the_run(connection, run)
        row = (
            insert(UserRequestRow)
            .values(run=run, verb=verb, args=args, asked_at=now, answer="")
            .returning(UserRequestRow.id)
        )
        return connection.execute(row).scalar_one()


def put_intent(
    connection: Connection,
    run: str,
    number: int,
    *,
    nonce: str,
    excluded: tuple[str, ...],
    epoch: int,
    reason: str,
    now: float,
) -> None:
    """Record that attempt `number` is about to be submitted to its run's scheduler."""
    owner = the_run(connection, run)
    values = {
        "run": run,
        "number": number,
        "state": AttemptState.INTENT,
        "nonce": nonce,
        "job_name": f"orch-{run}-{number}-{nonce}",
        "reason": "",
        "epoch": epoch,
        "nodes": (),
        "excluded": excluded,
        "intent_at": now,
        "generations": 0,
        "scheduler": owner.scheduler,
        "config_digest": owner.config_digest,
    }
    connection.execute(insertion(AttemptRow), values)
    note_transition(connection, run, "attempt", str(number), "", AttemptState.INTENT, reason, now)


def _free_name(connection: Connection, slug: str, root: Path) -> str:
    # The range matches an index ("." follows "-"); names with another tail belong to other slugs.
    tail = func.substr(RunRow.name, len(slug) + 2)
    ours = RunRow.name.between(f"{slug}-", f"{slug}.") & tail.op("NOT GLOB")("*[^0-9]*") & (tail != "")
    number = (connection.execute(select(func.max(cast(tail, Integer))).where(ours)).scalar() or 0) + 1
    while (root / f"{slug}-{number}").exists():
        number += 1
    return f"{slug}-{number}"
