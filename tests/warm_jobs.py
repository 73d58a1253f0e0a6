"""Local jobs as forks of the process in `tests/trainer/agent/warm_agents.py`, which has imported torch.

A job's process, its tasks and their fork servers import for six CPU seconds before they do what most end-to-end tests
are about. Here the same functions run with the same parents, arguments, environments and files, less the imports. Tests
on Slurm, of shared roots, of the wheel and of secrets start all of them as programs.
"""

import contextlib
import ctypes
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.warm_programs import as_program

ROOT = Path(__file__).resolve().parents[1]
WARM_START = ROOT / "tests" / "warm_start"
"""Folder for PYTHONPATH of whoever starts jobs; the variable WARM_JOBS names the socket of the warm process."""
ROOM = {"ROOM": "-" * 100_000}
"""Environment variable that the warm process must be started with: its place is for the environments of its forks."""
_JOB = ["-P", "-m", "orchestrator.scheduler.local.local_job"]
_AGENT = ["-P", "-u", "-m", "trainer.agent.main"]
_MOST = 1 << 20


# ---- in a controller or a command


def start_jobs_warm() -> None:
    """From here on, start local jobs of this process by an order to the warm process."""
    run = subprocess.run

    def run_or_order(command: Any, **options: Any) -> "subprocess.CompletedProcess[Any]":
        if list(command[1:4]) != _JOB:
            return run(command, **options)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST)
            link.settimeout(options["timeout"])
            link.connect(os.environ["WARM_JOBS"])
            link.send(json.dumps([command[4], str(options["cwd"]), dict(options["env"])]).encode())
            try:
                code, said = json.loads(link.recv(_MOST))
            except TimeoutError as error:
                raise subprocess.TimeoutExpired(command, options["timeout"]) from error
        return subprocess.CompletedProcess(command, code, "", said)

    subprocess.run = run_or_order  # type: ignore[assignment]


# ---- in the warm process and its forks


def listen() -> tuple[socket.socket, str]:
    """The socket that orders of jobs come to, and its name."""
    folder = tempfile.mkdtemp(prefix="orch-jobs-")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(f"{folder}/socket")
    made.listen()
    return made, f"{folder}/socket"


def fork_job(listener: socket.socket) -> int:
    """Fork the process that starts one job and answers the order; returns its pid."""
    link, _ = listener.accept()
    with link:
        if (pid := os.fork()) == 0:
            as_program(lambda: _start_job(link))
    return pid


def _start_job(link: socket.socket) -> None:
    from orchestrator.scheduler.local import local_job

    intent, folder, environ = json.loads(link.recv(_MOST))
    starter = os.getpid()
    with tempfile.TemporaryFile() as said:
        become(environ, said.fileno(), said.fileno(), keep=[link.fileno(), said.fileno()])
        os.chdir(folder)
        os.set_inheritable(link.fileno(), False)
        local_job.subprocess = SimpleNamespace(Popen=_start_task, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
        code = local_job.main([intent])
        if os.getpid() == starter:  # the job itself ends here, too, long after
            sys.stderr.flush()
            said.seek(0)
            link.send(json.dumps([code, said.read().decode(errors="replace")]).encode())
    sys.exit(code)


def become(environ: Mapping[str, str], output: int, errors: int, keep: list[int]) -> None:
    """Be a process with this environment, output and errors that has inherited nothing else but `keep`.

    Descriptors are turned to nothing, not closed: what owns them here closes them one day, when they would be others.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    output, errors = os.dup(output), os.dup(errors)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that the folder was read with
            if descriptor > 2 and descriptor not in (*keep, nothing):
                os.fstat(descriptor)
                os.dup2(nothing, descriptor, inheritable=False)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environ)
    _show_environment(environ)
    random.seed()


def _show_environment(environ: Mapping[str, str]) -> None:
    """Write it where /proc/PID/environ is read from: processes of a job are found there."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])  # `env_start` and `env_end` of proc(5)
    text = b"".join(f"{name}={value}".encode() + b"\0" for name, value in environ.items())
    assert len(text) <= end - begin, "the environment has no room in that of the warm process"
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _start_task(command: list[str], *, env: Mapping[str, str], stdin: int, stdout: Any, stderr: Any) -> Any:
    """In the place of the job's `Popen`: the agent that its shell would become, or what else it starts."""
    setup, _, last = command[-1].rpartition("\n")
    words = shlex.split(last)
    if command[:2] != ["bash", "-c"] or words[:-2] != ["exec", sys.executable, *_AGENT]:
        return subprocess.Popen(command, env=dict(env), stdin=stdin, stdout=stdout, stderr=stderr)
    shell = ["bash", "-c", f"{setup}\nexec env -0"]
    shown = subprocess.run(shell, env=dict(env), stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, check=True).stdout
    environ = dict(line.split("=", 1) for line in shown.decode().split("\0") if line)
    if (pid := os.fork()) == 0:
        as_program(lambda: _become_agent(environ, stdout.fileno(), stderr.fileno(), words[-2:]))
    from tests.trainer.agent.warm_agents import ForkServerProcess

    return ForkServerProcess(pid)


def _become_agent(environ: Mapping[str, str], output: int, errors: int, words: list[str]) -> None:
    from tests.trainer.agent.warm_agents import start_fork_server
    from trainer.agent import main
    from trainer.agent.fork_server.link import ForkServerLink

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    become(environ, output, errors, keep=[])
    ForkServerLink._start = staticmethod(start_fork_server)  # type: ignore[assignment,method-assign]
    sys.exit(main.main(words))
