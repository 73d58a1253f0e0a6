"""What /proc says of real processes: running, stopped, dead, and with an awkward name."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer.agent.processes import proc
from trainer.agent.processes.proc import OomKills
from trainer.agent.user_command.private_view import NAMESPACES
from trainer.agent.user_command.restore_program import can_unshare

BUSY = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) R (b', 0, 0, 0); print('on', flush=True)\nwhile True: pass"
IDLE = "import sys; print('on', flush=True); sys.stdin.read(); print('read', flush=True); import time; time.sleep(60)"


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that runs the given program and has said `on`."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", request.param], stdin=pipe, stdout=pipe) as process:
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
        stayed, left = map(int, leader.stdout.readline().split())
        nobody = 2**22 + 1  # above all pids
        found = proc.group_members({leader.pid, left, nobody})
        assert {group: sorted(pids) for group, pids in found.items()} == {
            leader.pid: sorted([leader.pid, stayed]), left: [left], nobody: []
        }  # fmt: skip
        leader.stdin.close()


LIMIT = 64 << 20
NOWHERE = Path("/nowhere")
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from trainer.agent.processes.proc import OomKills
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
kills = OomKills(**{"log": Path("/nowhere")} if sys.argv[2] == "counter" else {})

def ended(eats):
    pid = os.fork()
    if pid == 0:
        if eats:
            Path("/proc/self/oom_score_adj").write_text("1000")
            held = bytearray(256 << 20)
            held[::4096] = b"1" * len(held[::4096])
        os.kill(os.getpid(), signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    return kills.words(pid)

print(json.dumps([ended(eats) for eats in (False, True, False)]))
"""


@contextmanager
def cgroup_of(limit: int) -> Iterator[Path]:
    """A cgroup with so many bytes of memory; only root may make one."""
    v1 = Path("/sys/fs/cgroup/memory")
    folder = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"orch-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no cgroup with a limit can be made here: {error}")
    yield folder
    folder.rmdir()


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with cgroup_of(LIMIT) as folder:
        yield folder


def words(cgroup: Path, source: str) -> list[str]:
    """What is said of a killed process, of one that took too much memory, and of another killed one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cgroup), source], capture_output=True, text=True, timeout=60, check=False,
        cwd=Path(__file__).resolve().parents[4],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_counter_of_the_cgroup_shows_the_kill_and_its_limit(cgroup: Path) -> None:
    before, killed, _ = words(cgroup, "counter")
    assert before == ""
    assert killed == "the kernel killed it; the limit of its cgroup is 0.1 GiB"


def test_the_kernels_log_tells_which_process_it_was(cgroup: Path) -> None:
    kills = OomKills()
    readable = kills._log is not None
    kills.close()
    if not readable:
        pytest.skip("the kernel's log may not be read here")
    before, killed, after = words(cgroup, "log")
    assert (before, after) == ("", "")
    assert killed.startswith("the kernel killed it")


@pytest.mark.parametrize(
    ("version", "line"), [("memory.events", "0::/job/step"), ("memory.oom_control", "4:cpu,memory:/job/step")]
)
def test_files_of_both_versions_are_read(tmp_path: Path, version: str, line: str) -> None:
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    root = tmp_path / "fs" / ("memory" if version == "memory.oom_control" else "")
    step = root / "job" / "step"
    step.mkdir(parents=True)
    limit = "memory.limit_in_bytes" if version == "memory.oom_control" else "memory.max"
    (step / version).write_text("oom 3\noom_kill 2\n")
    (step / limit).write_text("max\n" if limit == "memory.max" else f"{2**63 - 4096}\n")
    (root / "job" / limit).write_text(f"{4 << 30}\n")
    kills = OomKills(cgroups=tmp_path / "fs", membership=tmp_path / "cgroup", log=NOWHERE)
    assert kills.words(1) == "", "what was killed before is no kill of a rank"
    (step / version).write_text("oom 4\noom_kill 3\n")
    assert kills.words(1) == "the kernel killed it; the limit of its cgroup is 4.0 GiB"


def test_without_cgroup_and_log_nothing_is_claimed(tmp_path: Path) -> None:
    kills = OomKills(cgroups=tmp_path, membership=tmp_path / "none", log=NOWHERE)
    assert kills.words(os.getpid()) == ""
    kills.close()


@pytest.mark.skipif(not can_unshare(NAMESPACES), reason="no user namespaces here")
def test_a_process_is_found_by_its_number_in_a_pid_namespace_of_its_own() -> None:
    inside = "echo $$; sleep 60 & echo $!; wait"
    with subprocess.Popen([*NAMESPACES, "sh", "-c", inside], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        shell, sleeper = (int(launcher.stdout.readline()) for _ in range(2))
        numbers = (shell, sleeper, launcher.pid, sleeper + 1, os.getpid())
        found = [proc.find_descendant(number, launcher.pid) for number in numbers]
        are_started = [one is not None and proc.is_descendant(one, launcher.pid) for one in found]
        launcher.kill()
    assert shell == 1
    assert are_started == [True, True, False, False, False]
    assert found[0] != found[1]
    assert found[2:] == [launcher.pid, None, None]
