"""`orch shell` and `orch debug` on the real Slurm: environment, place, terminal and exit code."""

import os
import pty
import select
import socket
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from tests.end_to_end.user import SMALL, TINY, User
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.multi]
LAB = [*SMALL, *TINY, "cluster.partition=low", "cluster.cpus_per_task=2", "train.steps=100000"]


class Terminal:
    """A command in a session with a terminal of its own."""

    def __init__(self, user: User, *words: str) -> None:
        self.text, command = "", [sys.executable, "-P", "-m", "orchestrator.cli.main", *words]
        self.pid, self.ours = pty.fork()
        if self.pid == 0:
            os.chdir(user.folder)
            os.execve(command[0], command, {**user.environment, "TERM": "xterm"})

    def type(self, line: str) -> None:
        os.write(self.ours, f"{line}\n".encode())

    def until(self, wanted: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while wanted not in self.text:
            assert time.monotonic() < end, f"no {wanted!r} in {self.text!r}"
            ready, _, _ = select.select([self.ours], [], [], 0.5)
            if ready:
                try:
                    self.text += os.read(self.ours, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    pytest.fail(f"it ended without {wanted!r}: {self.text!r}")

    def end(self) -> int:
        """Read the rest and return the exit code."""
        with suppress(OSError):  # the other side is closed
            while block := os.read(self.ours, 65536):
                self.text += block.decode(errors="replace")
        os.close(self.ours)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_shell_on_a_node_of_a_live_job(lab: SlurmLab, user: User, tmp_path: Path) -> None:
    user.environment["HUSH"] = "s3cret-value"
    run = user.submit("tiny-gpt", *LAB, *user.slowly(), "+env.COLOUR=blue sky", "env_from=[HUSH]")["run"]
    user.until(lambda: user.step(run) >= 1, 120, "the first step")
    job = user.status(run)["job_id"]
    nodes = lab.nodes_of(job)
    done = user.run("shell", run, "--rank", "1", "--", "sh", "-c", "echo $SLURMD_NODENAME/$COLOUR/$HUSH; exit 3")
    assert (done.returncode, done.stdout.strip()) == (3, f"{nodes[1]}/blue sky/s3cret-value"), done.stderr
    shell = Terminal(user, "shell", run, "--node", "0")
    shell.until(f"({run})")
    shell.type("echo node=$SLURMD_NODENAME run=$ORCH_RUN job=$SLURM_JOB_ID python=$(command -v python); tty")
    shell.until(f"node={nodes[0]} run={run} job={job} python={Path(sys.executable).parent}")
    shell.until("/dev/pts/")
    shell.type("exit 7")
    assert shell.end() == 7
    left = user.run("shell", run, "--node", "2")
    assert (left.returncode, "there is no node 2, only 0 to 1" in left.stderr) == (2, True)
    user.hurry()
    user.run("cancel", run, timeout=120)
    over = user.run("shell", run)
    assert (over.returncode, f"{run} is CANCELLED: it has no job" in over.stderr) == (4, True), over.stderr


def test_a_job_in_the_queue_has_no_shell_but_an_expected_start(lab: SlurmLab, user: User) -> None:
    blocker = lab.ask(
        "sbatch", "-p", "low", "-N", "4", "--exclusive", "--time=5", "--parsable", "-o", "/dev/null", "--wrap",
        "sleep 300",
    )  # fmt: skip
    assert blocker.returncode == 0, blocker.stderr
    run = user.submit("tiny-gpt", *LAB)["run"]
    seen = user.until(lambda: user.status(run)["expected_start"], 60, "Slurm's estimate")
    assert (seen["source"], seen["age_s"] < 120) == ("slurm", True)
    told = lab.ask("squeue", "-h", "--start", "-j", user.status(run)["job_id"], "-o", "%S").stdout.strip()
    assert abs(time.mktime(time.strptime(told, "%Y-%m-%dT%H:%M:%S")) - _epoch(seen["at"])) <= 120
    assert user.show(run)["expected_start"]["at"]
    said = user.run("shell", run)
    assert (said.returncode, "is PENDING" in said.stderr, "orch status" in said.stderr) == (4, True, True), said.stderr


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_debug_allocates_like_the_run_and_starts_its_ranks(lab: SlurmLab, user: User, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os\nprint('rank {RANK} of {WORLD_SIZE} {COLOUR} {OMP_NUM_THREADS}\\n'.format(**os.environ), end='')\n"
    )
    config = tmp_path / "job.yaml"
    config.write_text(
        f"command: [python, {script}]\nenv: {{COLOUR: green}}\n"
        "cluster: {kind: slurm, nodes: 2, ranks_per_node: 2, partition: low, cpus_per_task: 2, time: 12:00:00}\n"
    )
    usual = socket.socket()
    with suppress(OSError):  # another process has it
        usual.bind(("", 29400))  # torchrun's default port: the command names another one
        usual.listen()
    shell = Terminal(user, "debug", str(config), "--nodes", "2", "--time", "5")
    shell.until("all ranks:")
    told = next(line for line in shell.text.splitlines() if line.startswith("all ranks:")).partition(":")[2].strip()
    shell.until("(debug job)")
    shell.type("squeue -h -j $SLURM_JOB_ID -o 'nodes=%D limit=%l partition=%P name=%j'")
    shell.until("nodes=2 limit=5:00 partition=low name=debug-job")
    shell.type(f"{told}; echo torchrun=$?")
    shell.until("torchrun=0", 120)  # until then, srun passes what is typed to the ranks
    for rank in range(4):
        shell.until(f"rank {rank} of 4 green 1\r\n")
    usual.close()
    shell.type("exit 5")
    assert shell.end() == 5
    user.until(lambda: not lab.ask("squeue", "-h", "--me").stdout.strip(), 60, "the nodes to be free")
    assert user.ask("status") == []
