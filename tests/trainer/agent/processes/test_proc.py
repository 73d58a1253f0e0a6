"""What /proc says of real processes: running, stopped, dead, and with an awkward name."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from trainer.agent.processes import proc

BUSY = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) R (b', 0, 0, 0); print('on', flush=True)\nwhile True: pass"
IDLE = "import sys; print('on', flush=True); sys.stdin.read(); print('read', flush=True); import time; time.sleep(60)"


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that runs the given program and has said `on`."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", request.param], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        yield process
        process.kill()


def seen(pid: int) -> proc.ProcessActivity:
    signs = proc.read_activity(pid)
    assert signs is not None
    return signs


def wait_for_state(pid: int, state: str) -> None:
    end = time.monotonic() + 10
    while seen(pid).state != state and time.monotonic() < end:
        time.sleep(0.005)
    assert seen(pid).state == state


@pytest.mark.parametrize("child", [BUSY], indirect=True)
def test_a_busy_process_uses_its_processor_whatever_its_name(child: subprocess.Popen[bytes]) -> None:
    before = seen(child.pid)
    assert before.state == "R"
    end = time.monotonic() + 10
    while seen(child.pid).cpu_seconds < before.cpu_seconds + 0.05 and time.monotonic() < end:
        time.sleep(0.01)
    assert seen(child.pid).cpu_seconds >= before.cpu_seconds + 0.05


@pytest.mark.parametrize("child", [IDLE], indirect=True)
def test_bytes_through_a_pipe_are_a_sign_of_life(child: subprocess.Popen[bytes]) -> None:
    before = seen(child.pid)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"x" * 50_000)
    child.stdin.close()
    assert child.stdout.readline() == b"read\n"
    assert seen(child.pid).io_bytes >= before.io_bytes + 50_000


@pytest.mark.parametrize("child", [IDLE], indirect=True)
def test_a_stopped_process_is_seen_and_described(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    wait_for_state(child.pid, "T")
    told = proc.describe(child.pid)
    assert told is not None
    assert told["state"] == "T"
    assert "State:\tT (stopped)" in told["status"]
    assert told["threads"][0]["tid"] == child.pid
    assert told["threads"][0]["state"] == "T"
    assert "rchar" in told["io"]
    assert told["descriptors"]["0"].startswith("pipe:")
    assert "python" in told["cmdline"]


@pytest.mark.parametrize("child", [IDLE], indirect=True)
def test_a_dead_process_is_a_zombie_until_it_is_buried(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    wait_for_state(child.pid, "Z")
    told = proc.describe(child.pid)
    assert told is not None
    assert told["state"] == "Z"
    child.wait()
    assert proc.read_activity(child.pid) is None
    assert proc.describe(child.pid) is None


FAMILY = """
import subprocess, sys
children = [subprocess.Popen(["sleep", "60"], start_new_session=left) for left in (False, True)]
print(*[child.pid for child in children], flush=True)
sys.stdin.read()
for child in children: child.kill()
"""


def test_a_group_is_its_leader_and_the_children_that_have_not_left_it() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdin=pipe, stdout=pipe, process_group=0) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        stayed, left = map(int, leader.stdout.readline().split())
        nobody = 2**22 + 1  # above all pids
        found = proc.group_members({leader.pid, left, nobody})
        assert {group: sorted(pids) for group, pids in found.items()} == {
            leader.pid: sorted([leader.pid, stayed]), left: [left], nobody: []
        }  # fmt: skip
        leader.stdin.close()
