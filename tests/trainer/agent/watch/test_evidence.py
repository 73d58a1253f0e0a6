"""Evidence of real processes: living, stopped and dead ones, and file systems that hang or are full."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.agent.processes import proc
from trainer.agent.watch import evidence
from trainer.agent.watch.evidence import FILE, Subject, collect
from trainer.protocol.messages.ranks import STACKS

PROGRAM = """
import faulthandler, sys, threading
memory, ready = int(sys.argv[1]), sys.argv[2] == "ready"
def stand_here(): threading.Event().wait()
if ready:
    faulthandler.register(int(sys.argv[3]), file=memory, all_threads=True, chain=False)
threading.Thread(target=stand_here, name="other", daemon=True).start()
print("on", flush=True)
sys.stdin.read()
"""


class Stood:
    """A process that stands still, as a rank would."""

    def __init__(self, folder: Path, rank: int, how: str) -> None:
        memory = os.memfd_create("stacks")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(memory), how, str(int(STACKS))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory],
        )  # fmt: skip
        assert self.process.stdout.readline() == b"on\n"
        log = folder / f"{rank}.log"
        log.write_text("".join(f"line {number}\n" for number in range(1000)))
        self.subject = Subject(rank=rank, pid=self.process.pid, log=log, stacks=memory, cell={"step": 7})

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.subject.stacks)


@pytest.fixture
def stood(tmp_path: Path) -> Iterator[Any]:
    """`stood(rank, how)` -> a standing process."""
    made: list[Stood] = []

    def make(rank: int = 0, how: str = "ready") -> Stood:
        made.append(Stood(tmp_path, rank, how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def gather(folder: Path, subjects: list[Subject], full: set[int], seconds: float = 8.0, **over: Any) -> dict[str, Any]:
    return asyncio.run(collect(folder, 3, subjects, full, seconds, **over))


def test_a_living_rank_tells_everything(stood: Any, tmp_path: Path) -> None:
    one, other = stood(0), stood(1)
    bundle = tmp_path / "bundle"
    told = gather(bundle, [one.subject, other.subject], {0})
    text = (bundle / "stacks/rank-00000.txt").read_text()
    assert "stand_here" in text
    assert "Current thread" in text
    assert json.loads((bundle / "proc/rank-00000.json").read_text())["threads"][1]["state"] == "S"
    lines = (bundle / "logs/rank-00001.txt").read_text().splitlines()
    assert (len(lines), lines[-1]) == (100, "line 999")
    assert json.loads((bundle / "node-0003/cells.json").read_text())["1"] == {"pid": other.process.pid, "step": 7}
    assert "MemAvailable" in (bundle / "node-0003/memory.txt").read_text()
    assert "stacks/rank-00001.txt" not in {*told["written"], *told["missing"]}, "it was not asked for"
    assert told["missing"]["flight/rank-00000.json"] == "it has no flight server"
    assert set(told["written"]) == {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert {stat.S_IMODE(path.stat().st_mode) for path in bundle.rglob("*")} == {0o600, 0o700}


def test_stacks_are_asked_for_again_and_again(stood: Any) -> None:
    one = stood()
    answers = [asyncio.run(evidence.ask_for_stacks(one.process.pid, one.subject.stacks)) for _ in range(3)]
    assert {answer.count(b"Current thread") for answer in answers} == {1}
    assert {answer[:1] for answer in answers} == {b"T"}


def test_a_rank_that_does_not_know_the_signal_lives_on(stood: Any, tmp_path: Path) -> None:
    one = stood(how="unready")
    told = gather(tmp_path / "bundle", [one.subject], {0})
    assert told["missing"]["stacks/rank-00000.txt"] == "the process is not ready for the signal (yet)"
    signs = proc.read_activity(one.process.pid)
    assert signs.state == "S"


def test_a_stopped_rank_is_read_from_outside(stood: Any, tmp_path: Path) -> None:
    one = stood()
    os.kill(one.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, one.process.pid, os.WSTOPPED | os.WNOWAIT)
    told = gather(tmp_path / "bundle", [one.subject], {0})
    assert told["missing"]["stacks/rank-00000.txt"] == "the process is stopped and handles no signal"
    assert json.loads((tmp_path / "bundle/proc/rank-00000.json").read_text())["state"] == "T"
    outside = "stacks/rank-00000.py-spy.txt"
    if outside in told["missing"]:
        pytest.skip(told["missing"][outside])  # not installed, or not permitted here
    assert "stand_here" in (tmp_path / "bundle" / outside).read_text()


def test_of_a_dead_rank_its_log_remains(stood: Any, tmp_path: Path) -> None:
    one = stood()
    one.process.kill()
    one.process.wait()
    told = gather(tmp_path / "bundle", [one.subject, replace(one.subject, rank=1, pid=None)], {0, 1})
    for rank in (0, 1):
        assert told["missing"][f"stacks/rank-{rank:05d}.txt"] == "the process is dead"
        assert told["missing"][f"proc/rank-{rank:05d}.json"] == "no such process"
        assert f"logs/rank-{rank:05d}.txt" in told["written"]


def test_what_hangs_is_named_and_holds_up_nothing(stood: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, bundle, never = stood(), tmp_path / "bundle", threading.Event()
    slow = tmp_path / "hung.log"
    monkeypatch.setattr("trainer.agent.watch.evidence.read_tail", lambda *_: never.wait() and b"")
    (bundle / "proc").mkdir(parents=True)
    os.mkfifo(bundle / "proc/rank-00000.json")
    told = gather(bundle, [replace(one.subject, log=slow)], {0}, seconds=2.0)
    never.set()
    assert told["missing"]["logs/rank-00000.txt"] == "not collected within 0.8 s"
    assert told["missing"]["proc/rank-00000.json"] == "collected, but not written in time"
    assert "stacks/rank-00000.txt" in told["written"]


def test_a_process_with_a_hung_thread_can_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hung")
    program = (
        "import asyncio, pathlib\nfrom trainer.agent.processes.background_tasks import run_detached\n"
        f"try: asyncio.run(run_detached(pathlib.Path({str(tmp_path / 'hung')!r}).read_bytes, 0.1))\n"
        "except TimeoutError: print('late')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=20, check=True)
    assert done.stdout == b"late\n"


def test_the_size_of_files_and_bundles_is_bounded(stood: Any, tmp_path: Path) -> None:
    one, bundle = stood(), tmp_path / "bundle"
    one.subject.log.write_text("x" * (3 * FILE) + "the end")
    many = [replace(one.subject, rank=rank) for rank in range(8)]
    told = gather(bundle, many, set(), most=FILE)
    full = [name for name, why in told["missing"].items() if "the bundle is full" in why]
    assert full
    assert all(name.startswith(("logs/", "node-")) for name in full)
    logs = sum(path.stat().st_size for path in bundle.glob("logs/*"))
    assert logs <= FILE // 2, "what says more than a log has a part of its own"
    assert sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) <= FILE
    kept = next(bundle.glob("logs/*")).read_text()  # there is room for two, and they are looked for at once
    assert kept.endswith("the end")


def test_a_folder_that_cannot_be_written_is_told(stood: Any, tmp_path: Path) -> None:
    one = stood()
    (tmp_path / "bundle").write_text("in the way")
    told = gather(tmp_path / "bundle", [one.subject], {0})
    assert told["written"] == []
    assert "Not a directory" in told["missing"]["stacks/rank-00000.txt"] or "exists" in str(told["missing"])
