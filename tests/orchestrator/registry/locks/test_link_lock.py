"""The lock by link(): one holder at a time; what a dead one leaves is taken away by what was seen, not by clocks."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import RegistryError
from orchestrator.registry.locks.link_lock import PATIENCE, STALE_SECONDS, LinkLock

PROGRAM = Path(__file__).with_name("link_lock_program.py")
ROOT = PROGRAM.parents[3]
PROCESSES, ROUNDS = 3, 60


class Clock:
    """Moves when the lock waits."""

    def __init__(self, step: float = 1.0) -> None:
        self.now, self.step, self.waits = 0.0, step, 0

    def __call__(self) -> float:
        return self.now

    def pause(self) -> None:
        self.now += self.step
        self.waits += 1


def lock(folder: Path, clock: Clock) -> LinkLock:
    return LinkLock(folder / "registry.db", clock=clock, pause=clock.pause)


def leave(made: LinkLock, **who: object) -> None:
    """Somebody's lock, as it lies there."""
    made.path.write_text(json.dumps({"host": "node7", "boot": "b", "pid": 1, "started": "1", "nonce": "n", **who}))


def dead_process() -> int:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    return ended.pid


def test_writers_without_any_other_lock_lose_nothing(tmp_path: Path) -> None:
    """SQLite's own locks are off, so the link alone keeps the processes apart."""
    path = tmp_path / "registry.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE counter (value INTEGER)")
        made.execute("INSERT INTO counter VALUES (0)")
    made.close()
    command = [sys.executable, str(PROGRAM), str(path), str(ROUNDS), "linked"]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for _ in range(PROCESSES)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.close()  # all begin now
    assert [process.wait(timeout=120) for process in started] == [0] * PROCESSES
    made = sqlite3.connect(path)
    assert made.execute("SELECT value FROM counter").fetchone() == (PROCESSES * ROUNDS,)
    assert made.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    made.close()
    assert os.listdir(tmp_path) == ["registry.db"]


def test_a_living_holder_of_this_host_is_waited_for_and_named(tmp_path: Path) -> None:
    clock = Clock()
    first, second = lock(tmp_path, Clock()), lock(tmp_path, clock)
    named = f"locked by process {os.getpid()} on {socket.gethostname()}"
    with first.hold(), pytest.raises(RegistryError, match=named), second.hold():
        pytest.fail("two holders")
    assert clock.now >= PATIENCE
    with second.hold():
        assert second.path.exists()
    assert os.listdir(tmp_path) == []


def test_a_dead_holder_of_this_host_is_not_waited_for(tmp_path: Path) -> None:
    clock = Clock()
    made = lock(tmp_path, clock)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    leave(made, host=socket.gethostname(), boot=boot, pid=dead_process())
    with made.hold() as check:
        check()
    leave(made, host=socket.gethostname(), boot="an earlier one", pid=os.getpid())
    with made.hold() as check:
        check()
    assert clock.waits == 0
    assert os.listdir(tmp_path) == []


def test_another_hosts_lock_is_judged_by_what_was_seen_of_it(tmp_path: Path) -> None:
    """However old its file says that it is: clocks differ."""
    clock = Clock()
    made = lock(tmp_path, clock)
    leave(made)
    os.utime(made.path, (0, 0))
    with made.hold() as check:
        check()
    assert STALE_SECONDS <= clock.now < PATIENCE


def test_another_hosts_lock_that_changes_hands_is_never_stale(tmp_path: Path) -> None:
    clock = Clock(step=STALE_SECONDS / 3)
    made = lock(tmp_path, clock)
    pause = clock.pause

    def another() -> None:
        pause()
        leave(made, nonce=str(clock.now))

    made._pause = another
    leave(made)
    with pytest.raises(RegistryError, match="locked by process 1 on node7"), made.hold():
        pytest.fail("it lives")


def test_who_lost_the_lock_commits_nothing_and_leaves_the_others_alone(tmp_path: Path) -> None:
    made = lock(tmp_path, Clock())
    with made.hold() as check:
        made.path.unlink()
        leave(made)
        with pytest.raises(RegistryError, match="taken by another process in mid transaction: nothing was written"):
            check()
    assert json.loads(made.path.read_text())["host"] == "node7"


def test_a_lock_that_came_between_is_put_back(tmp_path: Path) -> None:
    made = lock(tmp_path, Clock())
    leave(made, nonce="the living one's")
    before = made.path.read_text()
    made._break("the dead one's")
    assert made.path.read_text() == before
    assert os.listdir(tmp_path) == [made.path.name]


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "null"])
def test_a_lock_that_says_nothing_is_another_hosts(tmp_path: Path, text: str) -> None:
    clock = Clock()
    made = lock(tmp_path, clock)
    made.path.write_text(text)
    with made.hold() as check:
        check()
    assert clock.now >= STALE_SECONDS
