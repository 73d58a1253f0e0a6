"""Who may take the lease, and when."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.controller.lease import Holder, acquire, host_name, may_take, start_time, this_process
from orchestrator.controller.watch import Watch
from orchestrator.errors import Fenced
from orchestrator.registry.records import Lease
from orchestrator.registry.store import Store
from tests.fakes.model_clock import FakeClock


def held(holder: str, renewed: float = 5.0) -> Lease:
    return Lease(epoch=3, holder=holder, renewed_at=renewed, expires_at=renewed + 60.0)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_holder_is_named_by_host_pid_and_start_time() -> None:
    me = this_process()
    assert Holder.parse(str(me)) == me
    assert me.lives is True
    assert me.started == start_time(os.getpid())
    once = this_process(once=True)
    assert Holder.parse(str(once)) == once
    assert once.lives is True
    assert Holder.parse("") is None
    assert Holder.parse("nonsense") is None


def test_a_process_that_got_a_reused_pid_is_not_the_holder() -> None:
    assert Holder(host=host_name(), pid=os.getpid(), started="1").lives is False


def test_a_dead_holder_on_this_host_is_taken_over_at_once() -> None:
    watch = Watch(FakeClock())
    assert may_take(held(f"{host_name()}:{dead_pid()}:123"), watch)
    assert may_take(held(""), watch)
    assert may_take(None, watch)


def test_a_live_holder_on_this_host_is_never_taken_over_however_old_its_lease() -> None:
    clock = FakeClock()
    watch, parent = Watch(clock), os.getppid()
    lease = held(f"{host_name()}:{parent}:{start_time(parent)}")
    for _ in range(5):
        clock.advance(1000.0)
        assert not may_take(lease, watch)


def test_another_host_s_lease_is_judged_by_our_own_watch_not_by_its_clock() -> None:
    clock = FakeClock()
    watch = Watch(clock)
    ancient = held("elsewhere:1:1", renewed=0.0)
    assert not may_take(ancient, watch)
    clock.advance(59.0)
    assert not may_take(ancient, watch)
    renewed = held("elsewhere:1:1", renewed=1.0)
    assert not may_take(renewed, watch), "a sign of life begins the time anew"
    clock.advance(60.0)
    assert may_take(renewed, watch)


def test_a_takeover_fences_the_one_before(tmp_path: Path) -> None:
    with Store.open(tmp_path / "registry.db") as store:
        old = store.take_lease(f"{host_name()}:{dead_pid()}:123", 10_000.0, 60.0)
        assert old is not None
        # Our clock is behind the dead holder's: its lease looks live, but its process is gone.
        taken = acquire(store, Watch(FakeClock()), 50.0)
        assert taken is not None
        assert taken.epoch == old.epoch + 1
        assert taken.renewed_at == 50.0
        with pytest.raises(Fenced):
            store.renew_lease(old, 60.0, 60.0)


def test_the_watch_outlives_the_process_but_not_the_boot(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "watch"
    first = Watch(clock, path, "boot-1")
    assert first.age("beat", 7) == 0.0
    first.save()
    clock.advance(60.0)
    assert Watch(clock, path, "boot-1").age("beat", 7) == 60.0
    assert Watch(clock, path, "boot-2").age("beat", 7) == 0.0
    path.write_text("torn")
    assert Watch(clock, path, "boot-1").age("beat", 7) == 0.0
