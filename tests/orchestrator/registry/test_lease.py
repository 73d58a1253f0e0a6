"""Who may take the lease, and when."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.errors import Fenced
from orchestrator.observed_since import ObservedSince
from orchestrator.registry import lease as leases
from orchestrator.registry.lease import (
    Holder,
    acquire,
    displayed_state,
    holder_host,
    host_name,
    observed_state,
    this_process,
)
from orchestrator.registry.records import Lease
from orchestrator.registry.store import Store
from tests.fakes.model_clock import FakeClock
from tests.fakes.new_runs import take_lease
from trainer.protocol.node_identity import UNKNOWN, process_space, process_state, start_time


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
    assert holder_host(str(me)) == host_name()


def test_a_process_that_got_a_reused_pid_is_not_the_holder() -> None:
    assert Holder(host=host_name(), pid=os.getpid(), started="1").lives is False


def test_a_process_in_another_container_is_neither_alive_nor_dead_until_its_lease_expires() -> None:
    clock = FakeClock()
    holder = Holder(host=host_name(), pid=dead_pid(), started="1", space="0a1b2c3d")
    assert (holder.is_here, holder.lives) == (False, None)
    observed, lease = ObservedSince(clock), held(str(holder))
    assert not may_take(lease, observed)
    watched(clock, observed, lease, 58.0)
    assert not may_take(lease, observed)
    watched(clock, observed, lease, 3.0)
    assert may_take(lease, observed)


def test_a_pid_namespace_is_a_space_of_its_own() -> None:
    program = "from trainer.protocol.node_identity import *; print(process_space(), is_visible(''))"
    words = [sys.executable, "-c", program]
    spaces = []
    for within in ([], ["--mount-proc"], None):
        command = words if within is None else ["unshare", "-pf", *within, *words]
        done = subprocess.run(
            command, cwd=Path(leases.__file__).parents[2], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip("pid namespaces cannot be made here")
        spaces.append(done.stdout.strip())
    assert spaces[0] == f"{UNKNOWN} False"
    assert spaces[1].endswith(" True")
    assert spaces[2] == f"{process_space()} True"
    assert spaces[1] != spaces[2]


def may_take(lease: Lease | None, observed: ObservedSince) -> bool:
    return observed_state(lease, observed).may_take


def watched(clock: FakeClock, observed: ObservedSince, lease: Lease, seconds: float) -> None:
    """Look every second for so long."""
    for _ in range(int(seconds)):
        clock.advance(1.0)
        observed_state(lease, observed)


def parent() -> str:
    pid = os.getppid()
    return f"{host_name()}:{pid}:{start_time(pid)}"


def test_a_dead_holder_on_this_host_is_taken_over_at_once() -> None:
    observed = ObservedSince(FakeClock())
    assert may_take(held(f"{host_name()}:{dead_pid()}:123"), observed)
    assert may_take(held(""), observed)
    assert may_take(None, observed)


@pytest.mark.parametrize("holder", [parent(), "elsewhere:1:1"])
def test_a_lease_expires_on_every_host_when_it_was_watched_unrenewed(holder: str) -> None:
    clock = FakeClock()
    observed, lease = ObservedSince(clock), held(holder, renewed=0.0)
    assert not may_take(lease, observed), "how old it is by a clock says nothing"
    watched(clock, observed, lease, 58.0)
    assert not may_take(lease, observed)
    renewed = held(holder, renewed=1.0)
    assert not may_take(renewed, observed), "a sign of life begins the time anew"
    watched(clock, observed, renewed, 60.0)
    state = observed_state(renewed, observed)
    assert (state.alive, state.stalled, state.may_take) == (False, True, True)
    assert state.reason.startswith("controller stalled for 60 s (pid ")


@pytest.mark.parametrize("holder", [parent(), "elsewhere:1:1"])
@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_no_clock_that_is_set_takes_a_lease_from_a_live_controller(
    tmp_path: Path, holder: str, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, wall = FakeClock(), 1_000_000.0
    monkeypatch.setattr(leases, "_end", lambda holder: None)
    with Store.open(tmp_path / "registry.db") as store:
        lease = take_lease(store, holder, wall, 60.0)
        observed = ObservedSince(clock)
        for _ in range(20):  # its own clock was set, and ours: it renews every 10 s as before
            wall += 10.0
            lease = store.renew_lease(lease, wall + jump, 60.0)
            for now in (wall, wall - jump, wall + jump):
                assert acquire(store, observed, now) is None
            clock.advance(10.0)
        watched(clock, observed, lease, 60.0)
        taken = acquire(store, observed, wall)
        assert taken is not None
        assert taken.epoch == lease.epoch + 1


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_of_two_that_watch_one_lease_expire_one_takes_it(tmp_path: Path, jump: float) -> None:
    clock = FakeClock()
    with Store.open(tmp_path / "registry.db") as store:
        stalled = take_lease(store, "elsewhere:1:1", 1_000.0 + jump, 60.0)
        take_lease(store, "a:1:1", 1_060.0, 60.0, over=[stalled])
        assert store.take_lease("b:1:1", 1_060.0 + jump, 60.0, over=[stalled]) is None
        assert store.take_lease("b:1:1", 1_060.0 - jump, 60.0, over=[stalled]) is None
    assert clock.now >= 0.0


def test_what_slept_with_the_holder_does_not_hold_it_against_it() -> None:
    clock = FakeClock()
    observed, lease = ObservedSince(clock), held(parent())
    watched(clock, observed, lease, 30.0)
    clock.advance(8 * 3600.0)  # the lid was closed
    assert not may_take(lease, observed)
    watched(clock, observed, lease, 9.0)
    assert not may_take(lease, observed), "the other one has just woken, too"


def test_a_stopped_process_is_said_to_stall_at_once_and_keeps_its_lease_for_its_time() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lease = held(f"{host_name()}:{sleeper.pid}:{start_time(sleeper.pid)}")
        assert displayed_state(lease, lease.renewed_at + 10.0).alive
        os.kill(sleeper.pid, signal.SIGSTOP)
        while process_state(sleeper.pid) != "T":
            pass
        state = displayed_state(lease, lease.renewed_at + 10.0)
        assert (state.alive, state.stalled, state.may_take) == (False, True, False)
        assert state.reason == (
            f"controller stalled for 10 s (pid {sleeper.pid} on {host_name()}): "
            "stopped by a signal; its lease expires in 50 s"
        )
    finally:
        sleeper.kill()
        sleeper.communicate()


@pytest.mark.parametrize(("age", "alive"), [(0.0, True), (59.0, True), (60.0, False), (86_400.0, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_people_are_shown_a_stalled_controller_after_a_minute_whichever_way_a_clock_went(
    age: float, alive: bool, sign: int
) -> None:
    lease = held("elsewhere:1:1", renewed=100_000.0)
    state = displayed_state(lease, 100_000.0 + sign * age)
    assert (state.alive, state.stalled) == (alive, not alive)


def test_a_takeover_fences_the_one_before(tmp_path: Path) -> None:
    with Store.open(tmp_path / "registry.db") as store:
        old = take_lease(store, f"{host_name()}:{dead_pid()}:123", 10_000.0, 60.0)
        # Our clock is behind the dead holder's: its lease looks live, but its process is gone.
        taken = acquire(store, ObservedSince(FakeClock()), 50.0)
        assert taken is not None
        assert taken.epoch == old.epoch + 1
        assert taken.renewed_at == 50.0
        with pytest.raises(Fenced):
            store.renew_lease(old, 60.0, 60.0)


def test_the_watch_outlives_the_process_but_not_the_boot(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "watch"
    first = ObservedSince(clock, path, "boot-1")
    assert first.age("beat", 7) == 0.0
    first.save()
    clock.advance(60.0)
    assert ObservedSince(clock, path, "boot-1").age("beat", 7) == 60.0
    assert ObservedSince(clock, path, "boot-2").age("beat", 7) == 0.0
    path.write_text("torn")
    assert ObservedSince(clock, path, "boot-1").age("beat", 7) == 0.0


def test_a_single_pass_lives_and_does_not_stay() -> None:
    for once in (True, False):
        pid = os.getppid()
        holder = Holder(host=host_name(), pid=pid, started=start_time(pid) or "", once=once, space=process_space())
        state = displayed_state(held(str(holder), time.time()), time.time())
        assert (state.alive, state.once, state.stays, state.may_write) == (True, once, not once, True)


def test_one_that_stalls_may_still_write_where_its_process_is_seen() -> None:
    now, pid = time.time(), os.getppid()
    here = Holder(host=host_name(), pid=pid, started=start_time(pid) or "", space=process_space())
    elsewhere = Holder(host="elsewhere", pid=pid, started="1")
    gone = Holder(host=host_name(), pid=pid, started="1", space=process_space())
    states = [displayed_state(held(str(one), now - 300.0), now) for one in (here, elsewhere, gone)]
    assert [(state.alive, state.stalled, state.may_write) for state in states] == [
        (False, True, True), (False, True, False), (False, False, False),
    ]  # fmt: skip
