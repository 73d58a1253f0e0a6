"""Controllers that come, stall, lose the lease and write late, against a small model: an old epoch never writes."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.errors import Fenced
from orchestrator.registry.records import Lease
from orchestrator.registry.store import Store
from orchestrator.states import LIVE_ATTEMPTS, AttemptState, may_move
from tests.fakes.new_runs import create_run

HOLDERS = st.sampled_from(["a", "b", "c"])
TTL = 10.0


@functools.cache
def empty_registry() -> Path:
    """A registry without runs, made once: migrations would be most of an example's time."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "registry.db"
    Store.open(path).close()
    return path


class Controllers(RuleBasedStateMachine):
    """Three controllers, each remembering the last lease it was given, however old."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        shutil.copyfile(empty_registry(), self.folder / "registry.db")
        self.store = Store.open(self.folder / "registry.db")
        run, _ = create_run(self.store, self.folder, {}, slug="r", cluster="local", now=0.0, nonce="00000000")
        self.run = run.name
        self.now = 0.0
        self.leases: dict[str, Lease] = {}
        # The model: who holds the lease with which epoch until when, and the attempts.
        self.holder, self.epoch, self.expires = "", 0, 0.0
        self.attempts = [AttemptState.INTENT]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def may_write(self, holder: str) -> bool:
        return bool(self.holder) and self.leases[holder].epoch == self.epoch

    @rule(seconds=st.floats(0.1, 15.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(holder=HOLDERS)
    def take(self, holder: str) -> None:
        lease = self.store.take_lease(holder, self.now, TTL)
        if self.holder not in ("", holder) and self.expires > self.now:
            assert lease is None
            return
        if self.holder != holder:
            self.holder, self.epoch = holder, self.epoch + 1
        self.expires = self.now + TTL
        assert lease is not None
        assert (lease.holder, lease.epoch, lease.expires_at) == (holder, self.epoch, self.expires)
        self.leases[holder] = lease

    @rule(holder=HOLDERS)
    def renew(self, holder: str) -> None:
        if holder not in self.leases:
            return
        try:
            renewed = self.store.renew_lease(self.leases[holder], self.now, TTL)
        except Fenced:
            assert not self.may_write(holder)
        else:
            assert self.may_write(holder)
            self.expires = self.now + TTL
            assert renewed.epoch == self.epoch

    @rule(holder=HOLDERS)
    def drop(self, holder: str) -> None:
        if holder in self.leases:
            mine = self.may_write(holder) and self.holder == holder
            self.store.drop_lease(self.leases[holder])
            if mine:
                self.holder, self.expires = "", 0.0

    @rule(holder=HOLDERS)
    def add_attempt(self, holder: str) -> None:
        if holder not in self.leases:
            return
        nonce, epoch = f"{len(self.attempts):08x}", self.leases[holder].epoch
        try:
            made = self.store.add_attempt(self.run, nonce=nonce, excluded=(), epoch=epoch, now=self.now)
        except Fenced:
            assert not self.may_write(holder)
        else:
            assert self.may_write(holder)
            self.attempts.append(AttemptState.INTENT)
            assert made.number == len(self.attempts)

    @rule(holder=HOLDERS, to=st.sampled_from(AttemptState), data=st.data())
    def move_attempt(self, holder: str, to: AttemptState, data: st.DataObject) -> None:
        if holder not in self.leases:
            return
        number = data.draw(st.integers(1, len(self.attempts)))
        before = self.attempts[number - 1]
        allowed = may_move(before, to) or before == to
        try:
            self.store.move_attempt(self.run, number, to, "r", epoch=self.leases[holder].epoch, now=self.now)
        except Fenced:
            assert not self.may_write(holder)
        except AssertionError:
            assert self.may_write(holder)
            assert not allowed
        else:
            assert self.may_write(holder)
            assert allowed
            self.attempts[number - 1] = to

    @invariant()
    def registry_is_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        assert [attempt.state for attempt in self.store.attempts(self.run)] == self.attempts
        held = self.store.lease()
        assert (held.holder, held.epoch) == (self.holder, self.epoch) if held else self.epoch == 0
        live = [state for state in self.attempts if state in LIVE_ATTEMPTS]
        moves = [item for item in self.store.transitions(self.run) if item.kind == "attempt"]
        assert len(moves) >= len(self.attempts) + len([s for s in self.attempts if s is not AttemptState.INTENT])
        assert len(live) <= len(self.attempts)


Controllers.TestCase.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestControllers = Controllers.TestCase
