"""Controllers and local jobs as forks of the process in `tests/trainer/agent/warm_agents.py`, which has imported torch.

A controller, a job's process, its tasks and their fork servers import for eight CPU seconds before they do what most
end-to-end tests are about. Here the same functions run with the same parents, arguments, environments and files, less
the imports; only a controller's parent is another. Tests of shared roots, of the wheel, of secrets and of how a
controller starts run all of them as programs, and those on Slurm their jobs.
"""

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tests.warm_root import MOST, as_program, become

_CONTROLLER = ["-P", "-m", "orchestrator.controller.service"]
_JOB = ["-P", "-m", "orchestrator.scheduler.local.local_job"]
_AGENT = ["-P", "-u", "-m", "trainer.agent.main"]


# ---- in a controller or a command


def start_warm_children() -> None:
    """From here on, start controllers and local jobs of this process by an order to the warm process.

    The variable WARM_CHILDREN names its socket.
    """
    run, spawn = subprocess.run, os.posix_spawn

    def run_or_order(command: Any, **options: Any) -> "subprocess.CompletedProcess[Any]":
        if list(command[1:4]) != _JOB:
            return run(command, **options)
        try:
            code, said = _order("job", command[4:], options["env"], str(options["cwd"]), options["timeout"])
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(command, options["timeout"]) from error
        return subprocess.CompletedProcess(command, code, "", said)

    def spawn_or_order(path: Any, command: Any, environ: Any, **options: Any) -> int:
        if command[1:4] != _CONTROLLER:
            return spawn(path, command, environ, **options)
        (log,) = (action[2] for action in options["file_actions"] if action[:2] == (os.POSIX_SPAWN_OPEN, 1))
        return int(_order("controller", command[4:], environ, log, 30.0))

    subprocess.run = run_or_order  # type: ignore[assignment]
    os.posix_spawn = spawn_or_order


def _order(what: str, arguments: list[str], environ: Mapping[str, str], place: str, seconds: float) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
        link.settimeout(seconds)
        link.connect(os.environ["WARM_CHILDREN"])
        link.send(json.dumps([what, arguments, dict(environ), place]).encode())
        return json.loads(link.recv(MOST))


# ---- in the warm process and its forks


def listen() -> tuple[socket.socket, str]:
    """The socket that orders come to, and its path."""
    folder = tempfile.mkdtemp(prefix="orch-orders-")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(f"{folder}/socket")
    made.listen()
    return made, f"{folder}/socket"


def fork_for_order(listener: socket.socket) -> int:
    """Fork the controller, or the process that starts what is ordered and answers; returns its pid."""
    begin = {"job": _start_job, "controller": _become_controller, "fork server": _keep_fork_server}
    link, _ = listener.accept()
    with link:
        message, descriptors, _, _ = socket.recv_fds(link, MOST, 3)
        what, *order = json.loads(message)
        if (pid := os.fork()) == 0:
            as_program(lambda: begin[what](link, descriptors, *order))
        if what == "controller":
            link.send(json.dumps(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)
    return pid


def _become_controller(
    _: socket.socket, __: list[int], arguments: list[str], environ: Mapping[str, str], log: str
) -> None:
    from orchestrator.controller import service

    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    become(environ, (os.open(os.devnull, os.O_RDONLY), output, output))
    start_warm_children()
    sys.argv = ["", *arguments]
    service.main()


def _start_job(link: socket.socket, _: list[int], intent: list[str], environ: Mapping[str, str], folder: str) -> None:
    from orchestrator.scheduler.local import local_job

    starter = os.getpid()
    with tempfile.TemporaryFile() as said, open(os.devnull) as nothing:
        become(environ, (nothing.fileno(), said.fileno(), said.fileno()), [link.fileno(), said.fileno()])
        os.chdir(folder)
        os.set_inheritable(link.fileno(), False)
        local_job.subprocess = SimpleNamespace(Popen=_start_task, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
        code = local_job.main(intent)
        if os.getpid() == starter:  # the job itself ends here, too, long after
            sys.stderr.flush()
            said.seek(0)
            link.send(json.dumps([code, said.read().decode(errors="replace")]).encode())
    sys.exit(code)


def _keep_fork_server(
    link: socket.socket, descriptors: list[int], environ: Mapping[str, str], attempt: str, agent: int
) -> None:
    """Be the parent of an agent's fork server until one of them ends; the other one is told."""
    from trainer.agent.fork_server import server
    from trainer.contract.ranks.progress import block_step_signals

    theirs, output, told = descriptors
    keeper, handle = os.getpid(), os.pidfd_open(agent)

    def begin() -> None:
        become(environ, (os.open(os.devnull, os.O_RDONLY), output, output), [theirs])
        server.main([str(theirs), str(keeper), attempt])

    with block_step_signals():
        if (pid := os.fork()) == 0:
            as_program(begin)
    link.send(str(pid).encode())
    for descriptor in (theirs, output, link.fileno()):
        os.close(descriptor)
    end = os.pidfd_open(pid)
    if end in select.select([end, handle], [], [])[0]:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # the agent has just ended
            os.write(told, str(code).encode())


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
    become(environ, (os.open(os.devnull, os.O_RDONLY), output, errors))
    ForkServerLink._start = staticmethod(start_fork_server)  # type: ignore[assignment,method-assign]
    sys.exit(main.main(words))
