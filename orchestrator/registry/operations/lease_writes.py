"""Leases: who may act for which scheduler's runs, and the epoch that fences everybody who may not any more."""

from collections.abc import Sequence

from sqlalchemy import Connection, func, insert, select, update

from orchestrator.errors import Fenced, ForeignRun
from orchestrator.registry.database import StoreOperations, writes
from orchestrator.registry.models import LeaseRow, RunRow
from orchestrator.registry.records import Lease
from orchestrator.registry.rows import record

NOBODY = ""
"""The holder of a lease that was dropped."""
ALL_RUNS = ""
"""The scheduler of a lease that is for every run: of `orch db rebuild`, and of controllers of older versions."""


class LeaseWrites(StoreOperations):
    """Taking, keeping and dropping the lease of one scheduler instance."""

    @writes
    def take_lease(
        self,
        connection: Connection,
        holder: str,
        now: float,
        ttl: float,
        scheduler: str = ALL_RUNS,
        over: Sequence[Lease] | None = None,
    ) -> Lease | None:
        """The lease, when it is free, expired, or this holder's own; None while another one is live.

        `over`: leases that the caller has watched for long enough to know that their holders stall, whatever this
        host's clock says: where it is given, those that still are as they were there count as expired, and no others.
        A holder that did not have it yet gets an epoch above all others, which fences the one before. The lease for
        all runs and that of a single scheduler exclude each other.
        """
        assert holder, "a lease needs a holder"
        others = [
            row for row in _rows(connection) if scheduler in (ALL_RUNS, row.scheduler) or row.scheduler == ALL_RUNS
        ]
        if any(is_live(row, now, over) for row in others if row.holder not in (NOBODY, holder)):
            return None
        fields = {"holder": holder, "renewed_at": now, "expires_at": now + ttl}
        held = next((row for row in others if row.scheduler == scheduler), None)
        for row in others:
            if row is not held:
                _set(connection, row.epoch, holder=NOBODY, expires_at=0.0)
        newest = connection.execute(select(func.coalesce(func.max(LeaseRow.epoch), 0))).scalar_one()
        if held is None:
            connection.execute(insert(LeaseRow).values(epoch=newest + 1, ticked_at=0.0, scheduler=scheduler, **fields))
            return _current(connection, newest + 1)
        epoch = held.epoch if held.holder == holder else newest + 1
        _set(connection, held.epoch, epoch=epoch, **fields)
        return _current(connection, epoch)

    @writes
    def renew_lease(self, connection: Connection, lease: Lease, now: float, ttl: float) -> Lease:
        """Keep the lease for another `ttl` seconds; raises Fenced when somebody else has it by now."""
        fence(connection, lease.epoch)
        _set(connection, lease.epoch, renewed_at=now, expires_at=now + ttl)
        renewed = _current(connection, lease.epoch)
        assert renewed is not None
        return renewed

    @writes
    def drop_lease(self, connection: Connection, lease: Lease) -> None:
        """Give the lease back; nothing happens when somebody else has it by now."""
        held = _current(connection, lease.epoch)
        if held is not None and held.holder == lease.holder:
            _set(connection, lease.epoch, holder=NOBODY, expires_at=0.0)

    @writes
    def ticked(self, connection: Connection, lease: Lease, now: float) -> None:
        """Note that a whole pass over the runs has ended; raises Fenced when the lease is lost."""
        fence(connection, lease.epoch)
        _set(connection, lease.epoch, ticked_at=now)


def is_live(held: Lease, now: float, over: Sequence[Lease] | None) -> bool:
    """Whether a lease that somebody holds keeps others from it (`over` as in `take_lease`)."""
    if over is None:
        return held.expires_at > now
    return (held.epoch, held.renewed_at) not in {(watched.epoch, watched.renewed_at) for watched in over}


def fence(connection: Connection, epoch: int, run: str | None = None) -> Lease:
    """Refuse a write of a controller that is no holder (any more), or not of the run's scheduler; raises Fenced.

    An expired lease still passes while nobody has taken it: this check and the write are one transaction.
    """
    held = _current(connection, epoch)
    if held is None or held.holder == NOBODY:
        live = [f"epoch {row.epoch} is in force" for row in _rows(connection) if row.holder != NOBODY]
        raise Fenced(f"a controller with epoch {epoch} may not write: {', '.join(live) or 'nobody holds the lease'}")
    if run is not None and held.scheduler != ALL_RUNS:
        owner = connection.execute(select(RunRow.scheduler).where(RunRow.name == run)).scalar()
        if owner not in (None, "", held.scheduler):
            raise ForeignRun(f"the controller of {held.scheduler} may not write: {run} belongs to {owner}")
    return held


def _rows(connection: Connection) -> list[Lease]:
    return [record(Lease, row) for row in connection.execute(select(LeaseRow.__table__)).mappings()]


def _current(connection: Connection, epoch: int) -> Lease | None:
    """The lease with this epoch: no other has it."""
    row = connection.execute(select(LeaseRow.__table__).where(LeaseRow.epoch == epoch)).mappings().first()
    return record(Lease, row) if row else None


def _set(connection: Connection, of_epoch: int, **changes: object) -> None:
    connection.execute(update(LeaseRow).where(LeaseRow.epoch == of_epoch).values(**changes))
