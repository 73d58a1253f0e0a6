"""Controllers, local jobs and checks of user code as forks of the process in `tests/trainer/agent/warm_agents.py`.

A controller, a job's process, its tasks and their fork servers spend eight CPU seconds on imports. Here the same
functions run with the same parents, arguments, environments and files, without the imports; only the parents of
controllers and checks differ. Tests of shared roots, of the wheel and of a controller's start run all of them as
programs; tests of secrets all but fork servers; tests on Slurm all agents and, without `warm_python`, their fork
servers.
"""

import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.warm_root import MOST, ROOT, as_program, become

if TYPE_CHECKING:
    from tests.trainer.agent.warm_agents import WarmAgent

_CONTROLLER = ["-P", "-m", "orchestrator.controller.service"]
_JOB = ["-P", "-m", "orchestrator.scheduler.local.local_job"]
_INSPECTION = ["-P", "-m", "trainer.worker.startup.inspect_workload"]
_AGENT = ["-P", "-u", "-m", "trainer.agent.main"]


# ---- in a controller or a command


def start_warm_children() -> None:
    """Start later controllers, local jobs and checks of user code through the warm process.

    The variable WARM_CHILDREN names its socket.
    """
    from orchestrator.submission import user_code

    run, spawn = subprocess.run, os.posix_spawn

    def run_or_order(command: Any, **options: Any) -> "subprocess.CompletedProcess[Any]":
        if list(command[1:4]) != _JOB:
            return run(command, **options)
        try:
            order = ("job", command[4:], dict(options["env"]), str(options["cwd"]))
            code, said = _order(*order, seconds=options["timeout"])
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(command, options["timeout"]) from error
        return subprocess.CompletedProcess(command, code, "", said)

    def spawn_or_order(path: Any, command: Any, environ: Any, **options: Any) -> int:
        if command[1:4] != _CONTROLLER:
            return spawn(path, command, environ, **options)
        (log,) = (action[2] for action in options["file_actions"] if action[:2] == (os.POSIX_SPAWN_OPEN, 1))
        return int(_order("controller", command[4:], dict(environ), log))

    user_code.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _popen_or_order})  # type: ignore[assignment]
    subprocess.run = run_or_order  # type: ignore[assignment]
    os.posix_spawn = spawn_or_order


def _order(what: str, *order: object, descriptors: Sequence[int] = (), seconds: float = 30.0) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
        link.settimeout(seconds)
        link.connect(os.environ["WARM_CHILDREN"])
        socket.send_fds(link, [json.dumps([what, *order]).encode()], descriptors)
        return json.loads(link.recv(MOST))


def order_program(
    module: str, words: Sequence[str], environ: Mapping[str, str], streams: Sequence[int], link: int
) -> "WarmAgent":
    """Start `module` like `python -m`, with `link` as its first argument."""
    from tests.trainer.agent.warm_agents import WarmAgent

    status, told = os.pipe()
    order = ("program", dict(environ), os.getcwd(), module, *words)
    pid = _order(*order, descriptors=[*streams, link, told])
    os.close(told)
    return WarmAgent(pid, status)


def _popen_or_order(command: list[str], **options: Any) -> Any:
    """Replacement of `Popen` in checks of user code."""
    if command[1:-1] != _INSPECTION or options["env"].get("PYTHONPATH") != str(ROOT):
        return subprocess.Popen(command, **options)
    stdin, written = os.pipe()
    streams = [stdin, options["stdout"].fileno(), options["stderr"].fileno()]
    child = order_program(_INSPECTION[-1], [], options["env"], streams, *options["pass_fds"])
    os.close(stdin)
    child.stdin = os.fdopen(written, "wb")
    return child


# ---- in the warm process and its forks


def listen() -> tuple[socket.socket, str]:
    """Return the socket for orders, and its path."""
    folder = tempfile.mkdtemp(prefix="orch-orders-")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(f"{folder}/socket")
    made.listen()
    return made, f"{folder}/socket"


def fork_for_order(listener: socket.socket) -> tuple[int, int]:
    """Fork the ordered process, or the one that starts a job; return its pid and the descriptor for its exit code."""
    begin = {"job": _start_job, "controller": _become_controller, "program": _become_program}
    link, _ = listener.accept()
    with link:
        message, descriptors, _, _ = socket.recv_fds(link, MOST, 8)
        what, *order = json.loads(message)
        told = descriptors.pop() if descriptors else os.open(os.devnull, os.O_WRONLY)
        if (pid := os.fork()) == 0:
            as_program(lambda: begin[what](link, descriptors, *order))
        for descriptor in descriptors:
            os.close(descriptor)
        if what != "job":
            link.send(json.dumps(pid).encode())
    return pid, told


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


def _become_program(
    _: socket.socket, descriptors: list[int], environ: Mapping[str, str], folder: str, module: str, *words: str
) -> None:
    """Run as a program; its first argument is its descriptor, and PARENT stands for its parent's pid."""
    os.setsid()
    os.chdir(folder)
    *streams, link = descriptors
    become(environ, (streams[0], streams[1], streams[2]), [link])
    parent = str(os.getppid())
    importlib.import_module(module).main([str(link), *(parent if word == "PARENT" else word for word in words)])


def _start_task(command: list[str], *, env: Mapping[str, str], stdin: int, stdout: Any, stderr: Any) -> Any:
    """Replacement of the job's `Popen`: start the agent that its shell would exec, or any other program."""
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
