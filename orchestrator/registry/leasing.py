"""The lease: who may act, and the epoch that fences everybody who may not any more."""

from sqlalchemy import Connection, insert, select, update

from orchestrator.errors import Fenced
from orchestrator.registry.database import Verbs, writes
from orchestrator.registry.records import Lease
from orchestrator.registry.rows import record
from orchestrator.registry.schema import LeaseRow

NOBODY = ""
"""The holder of a lease that was dropped."""


class Leasing(Verbs):
    """Taking, keeping and dropping the one lease."""

    @writes
    def take_lease(
        self, connection: Connection, holder: str, now: float, ttl: float, over: Lease | None = None
    ) -> Lease | None:
        """The lease, when it is free, expired, this holder's own, or still as it was in `over`; None otherwise.

        `over`: what the caller has watched for long enough to know that its holder stalls, whatever its clock says.
        A holder that did not have it yet gets a higher epoch, which fences the one before.
        """
        assert holder, "a lease needs a holder"
        held = _current(connection)
        if held is None:
            lease = Lease(epoch=1, holder=holder, renewed_at=now, expires_at=now + ttl)
            connection.execute(insert(LeaseRow).values(id=1, **lease.__dict__))
            return lease
        known = over is not None and (held.epoch, held.renewed_at) == (over.epoch, over.renewed_at)
        if held.holder not in (NOBODY, holder) and not (known if over is not None else held.expires_at <= now):
            return None
        epoch = held.epoch if held.holder == holder else held.epoch + 1
        return _set(connection, epoch=epoch, holder=holder, renewed_at=now, expires_at=now + ttl)

    @writes
    def renew_lease(self, connection: Connection, lease: Lease, now: float, ttl: float) -> Lease:
        """Keep the lease for another `ttl` seconds; raises Fenced when somebody else has it by now."""
        _check(connection, lease)
        return _set(connection, renewed_at=now, expires_at=now + ttl)

    @writes
    def drop_lease(self, connection: Connection, lease: Lease) -> None:
        """Give the lease back; nothing happens when somebody else has it by now."""
        held = _current(connection)
        if held is not None and (held.epoch, held.holder) == (lease.epoch, lease.holder):
            _set(connection, holder=NOBODY, expires_at=0.0)

    @writes
    def ticked(self, connection: Connection, lease: Lease, now: float) -> None:
        """Note that a whole pass over all runs has ended; raises Fenced when the lease is lost."""
        _check(connection, lease)
        _set(connection, ticked_at=now)


def fence(connection: Connection, epoch: int) -> None:
    """Refuse a write of a controller that is not the holder (any more); raises Fenced.

    An expired lease still passes while nobody has taken it: this check and the write are one transaction.
    """
    held = _current(connection)
    if held is None or held.holder == NOBODY or held.epoch != epoch:
        now_held = f"epoch {held.epoch} is in force" if held and held.holder else "nobody holds the lease"
        raise Fenced(f"a controller with epoch {epoch} may not write: {now_held}")


def _check(connection: Connection, lease: Lease) -> None:
    fence(connection, lease.epoch)


def _current(connection: Connection) -> Lease | None:
    row = connection.execute(select(LeaseRow.__table__).where(LeaseRow.id == 1)).mappings().first()
    return record(Lease, row) if row else None


def _set(connection: Connection, **changes: object) -> Lease:
    connection.execute(update(LeaseRow).where(LeaseRow.id == 1).values(**changes))
    lease = _current(connection)
    assert lease is not None
    return lease
