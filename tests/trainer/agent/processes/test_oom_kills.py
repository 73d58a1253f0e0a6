"""Processes that the real kernel kills for lack of memory, told from those that somebody else kills."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer.agent.processes.proc import OomKills

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
    assert killed == "the kernel killed it, its cgroup may have 0.1 GiB"


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
    assert kills.words(1) == "the kernel killed it, its cgroup may have 4.0 GiB"


def test_without_cgroup_and_log_nothing_is_claimed(tmp_path: Path) -> None:
    kills = OomKills(cgroups=tmp_path, membership=tmp_path / "none", log=NOWHERE)
    assert kills.words(os.getpid()) == ""
    kills.close()
