"""What launchers print about a failed rank, as real ones printed it, and the processes that they have started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.agent.processes.proc import descendants
from trainer.agent.rank_processes.launcher_report import LauncherReport, read_report
from trainer.agent.rank_processes.local_ranks import LocalRanks
from trainer.agent.rank_processes.rank_exit import last_output, share_end
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages.agents import InjectFault
from trainer.protocol.messages.ranks import generation_mark

TORCHRUN = """\
hello 2 4 0
[rank2]: Traceback (most recent call last):
[rank2]:   File "train.py", line 17, in <module>
[rank2]:     dist.barrier()
[rank2]: RuntimeError: [pair.cc:537] Read error [127.0.0.1]:46477: Connection reset by peer.
W1128 08:47:50.926000 27772 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 28157 closing signal SIGTERM
E1128 08:47:51.143000 27772 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 1 (pid: 28159) of binary: /usr/bin/python
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
train.py FAILED
"""  # noqa: E501
RAISED = """\
W1128 08:56:11.075000 18554 torch/multiprocessing/spawn.py:165] Terminating process 19018 via signal SIGTERM
Traceback (most recent call last):
  File "spawn.py", line 12, in <module>
    mp.spawn(main, args=(2,), nprocs=2)
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "spawn.py", line 9, in main
    raise ValueError("bad batch")
ValueError: bad batch
"""
KILLED = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL\n"
LEFT = "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with exit code 3\n"
DEEPSPEED = (
    "[2026-11-28 09:06:33,894] [INFO] [launch.py:327:sigkill_handler] Killing subprocess 7679\n"
    "[2026-11-28 09:06:33,914] [ERROR] [launch.py:333:sigkill_handler] ['python', '-u', 'ds.py', '--local_rank=1'] "
    "exits with return code = -9\n"
)
COMPOSER = "ERROR:composer.cli.launcher:Global rank 1 (PID 77) exited with code 1\n"
MPI = "mpirun noticed that process rank 1 with PID 0 on node n1 exited on signal 9 (Killed).\n"


@pytest.mark.parametrize(
    ("text", "report"),
    [
        (TORCHRUN.format(code=-9), LauncherReport(local_rank=1, signal=signal.SIGKILL, is_complete=True)),
        (TORCHRUN.format(code=3), LauncherReport(local_rank=1, exit_code=3, is_complete=True)),
        (RAISED, LauncherReport(local_rank=1)),
        (KILLED, LauncherReport(local_rank=1, signal=signal.SIGKILL)),
        (LEFT, LauncherReport(local_rank=0, exit_code=3)),
        (DEEPSPEED, LauncherReport(signal=signal.SIGKILL)),
        (COMPOSER, LauncherReport(exit_code=1)),
        (MPI, LauncherReport(local_rank=1, signal=signal.SIGKILL)),
        ("step 20 failed once\n", LauncherReport()),
    ],
)
def test_the_report_names_the_rank_and_how_it_ended(text: str, report: LauncherReport) -> None:
    assert read_report(text.splitlines())[0] == report


def test_tracebacks_of_the_launcher_and_of_other_ranks_are_not_the_cause(tmp_path: Path) -> None:
    log, error_file = tmp_path / "log", tmp_path / "none"
    log.write_text(f"{generation_mark(1)}\n{TORCHRUN.format(code=-9)}")
    assert last_output(log, 1, error_file, (4, 5)).exception is None
    own = TORCHRUN.format(code=1).replace("[rank2]: RuntimeError", "[rank5]: ValueError").replace("[rank2]", "[rank5]")
    log.write_text(f"{generation_mark(1)}\n{own}")
    found = last_output(log, 1, error_file, (4, 5))
    assert found.exception == "ValueError"
    assert found.lines[-1].startswith("W1128")
    log.write_text(f"{generation_mark(1)}\n{own.partition('W1128')[0]}{DEEPSPEED}")  # names no rank
    assert last_output(log, 1, error_file, (4, 5)).exception == "ValueError"
    assert last_output(log, 1, error_file, (4, 5), 4).exception is None
    log.write_text(f"{generation_mark(1)}\n{RAISED}")
    assert last_output(log, 1, error_file, (4, 5)).message == "bad batch"


# A launcher that starts two ranks: each claims its cell and waits.
_LAUNCHER = """
import os, subprocess, sys, time
start = lambda n: subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "LOCAL_RANK": str(n)})
ranks = [start(n) for n in (0, 1)]
print("started", flush=True)
[one.wait() for one in ranks]
time.sleep(600)
"""
_RANK = """
import sys, time
sys.path.insert(0, {folder!r})
import program_rank
program_rank.current()
time.sleep(600)
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[LocalRanks]:
    """Yield the ranks 4 and 5 of one launcher's process."""
    found = LocalRanks(1, range(4, 6), per_node=True)
    folder = Path(__file__).parents[4] / "trainer" / "agent" / "instrument"
    cells = ",".join(f"/proc/{os.getpid()}/fd/{local.cell.descriptor}" for local in found.by_rank.values())
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, _RANK.format(folder=str(folder))], env={**os.environ, "ORCH_CELLS": cells},
        start_new_session=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    for local in found.by_rank.values():
        local.pid = launcher.pid
    yield found
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert launcher.stdout is not None
    launcher.stdout.close()
    found.close()
    for local in found.by_rank.values():
        local.close_theirs()


def wait_for_programs(ranks: LocalRanks) -> None:
    until = time.monotonic() + 60
    while not all(local.program for local in ranks.by_rank.values()) and time.monotonic() < until:
        ranks.find_programs()
        time.sleep(0.01)


def test_the_processes_of_a_launcher_are_found_and_the_first_dead_is_named(ranks: LocalRanks) -> None:
    order = InjectFault(kind="kill-rank", at=5, value=0.0)
    assert ranks.awaits_program(order)
    wait_for_programs(ranks)
    assert not ranks.awaits_program(order)
    first, second = ranks.by_rank.values()
    assert first.program != second.program
    assert second.pid is not None
    assert set(descendants([second.pid])[second.pid]) == {first.pid, first.program, second.program}
    assert ranks.first_dead() is None
    assert second.program is not None
    os.kill(second.program, signal.SIGKILL)
    until = time.monotonic() + 60
    while not ranks.find_programs() and time.monotonic() < until:
        time.sleep(0.01)
    assert not ranks.find_programs()  # only the first death is news
    assert ranks.first_dead() == 5
    assert first.program is not None
    os.kill(first.program, signal.SIGSTOP)
    until = time.monotonic() + 60
    while not ranks.all_stopped() and time.monotonic() < until:  # only the stopped one is left, so nobody acts
        time.sleep(0.01)
    assert ranks.all_stopped()


def test_a_process_that_the_launcher_has_not_started_is_not_a_rank(ranks: LocalRanks) -> None:
    wait_for_programs(ranks)
    local = ranks.by_rank[4]
    before = local.program
    local.follow(os.getpid())
    assert local.program == before


def test_all_ranks_end_with_their_launcher_and_one_is_the_cause(ranks: LocalRanks) -> None:
    end = RankEnd(rank=5, exit_code=None, signal=9, out_of_memory="the kernel killed it")
    cause, other = share_end(end, ranks)
    assert cause == end
    assert (other.rank, other.secondary, other.signal, other.exit_code, other.out_of_memory) == (4, True, None, 1, "")
    good = share_end(RankEnd(rank=4, exit_code=0), ranks)
    assert [one.good for one in good] == [True, True]
