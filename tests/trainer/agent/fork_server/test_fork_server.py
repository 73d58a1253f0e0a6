"""The fork server by itself, with a test for its agent."""

import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, resource, sys
from trainer.protocol.messages.ranks import packet_pair, receive_packet, send_packet
from trainer.agent.fork_server.server import ForkServer
from trainer.protocol.messages.ranks import FROM_FORK_SERVER, RankEnd, RankGone, RankSpawned, StartRank

resource.setrlimit(resource.RLIMIT_NOFILE, (4096, max(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
ours, theirs = packet_pair()
order = StartRank(rank=0, generation=1, env={}, command=("sh", "-c", "exit 7"), folder="/")
send_packet(ours, order, [os.dup(2)])
if os.fork() == 0:
    ours.close()
    ForkServer(theirs, None).serve()
    os._exit(0)
theirs.close()
for kind in (RankSpawned, RankEnd, RankGone):
    message, descriptors = receive_packet(ours, FROM_FORK_SERVER)
    assert isinstance(message, kind), message
    if kind is RankEnd:
        assert message.exit_code == 7, message
ours.close()
os.wait()
"""


def test_it_works_when_the_workload_has_opened_a_thousand_files() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "--- generation 1 ---\n")


IGNORED = """
import os, signal
from trainer.agent.fork_server.server import _run_command
from trainer.protocol.rank_progress.progress import outlive_step_signals

outlive_step_signals()
if os.fork() == 0:
    _run_command(["grep", "Sig[BI]", "/proc/self/status"], "/")
os.wait()
"""


def test_a_command_inherits_no_signal_but_the_warnings_ignored() -> None:
    ended = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True, timeout=60, check=True)
    masks = dict(line.split(":\t") for line in ended.stdout.splitlines())
    warnings = 1 << (signal.SIGUSR1 - 1) | 1 << (signal.SIGUSR2 - 1)
    pythons_own = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    # A shell starts a background job with some signals ignored: those are inherited by every process below it.
    own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn"))
    inherited = int(own.split(":\t")[1], 16) & ~pythons_own
    assert (int(masks["SigBlk"], 16), int(masks["SigIgn"], 16)) == (0, warnings | inherited)


UNSAFE = """
import threading
from trainer.agent.fork_server.server import fork_unsafe_reason

print(repr(fork_unsafe_reason()))
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(fork_unsafe_reason())
"""


def test_a_thread_of_an_import_makes_forks_unsafe_and_that_is_said() -> None:
    ended = subprocess.run([sys.executable, "-c", UNSAFE], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == ["''", "importing the workload started 1 thread(s)"]
