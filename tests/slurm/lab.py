"""A real Slurm of some nodes on this machine, in one private folder: `python -m tests.slurm.lab start FOLDER`."""

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.debian_suites import SuiteError, install
from tests.slurm import processes
from tests.slurm.settings import Ports, slurm_conf, slurmdbd_conf
from tests.slurm.suites import MACHINE, SUITES, LabError, installation

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "slurmdbd", "mariadb-server")
PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "sbatch", "sacct", "munged", "mariadbd", "mariadb-install-db")
_SBIN = "/usr/sbin:/sbin"
_PR_SET_PDEATHSIG = 1


def missing_programs() -> list[str]:
    """Return the lab's programs that are not installed."""
    path = f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def install_packages() -> None:
    """Install the machine's packages. Raises LabError or SuiteError if that is impossible."""
    # Several workers of one test run may install at the same time, but dpkg's lock is exclusive.
    with (Path(tempfile.gettempdir()) / f"orch-lab-install-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not missing_programs():
            return
        install(*PACKAGES)
    if missing_programs():
        raise LabError(f"still missing after the installation: {', '.join(missing_programs())}")


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, outside the kernel's range for clients."""
    found: list[int] = []
    while len(found) < count:
        candidate = 10000 + secrets.randbelow(20000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", candidate))
            if candidate not in found:
                found.append(candidate)
    return found


class SlurmLab:
    """munge, MariaDB, slurmdbd, slurmctld and one slurmd for each node; nothing outside `folder` is touched."""

    def __init__(
        self, folder: Path, nodes: int = 4, cpus: int = 8, *, extra: str = "", suite: str = MACHINE
    ) -> None:  # fmt: skip
        if os.geteuid() != 0:
            raise LabError("its slurmd must run as root")
        install_packages()
        self.slurm = installation(suite)
        self.folder, self.cpus = folder.resolve(), cpus
        self.nodes = [f"n{index}" for index in range(1, nodes + 1)]
        self.conf, self.extra = self.folder / "slurm.conf", extra  # extra: more lines of slurm.conf
        self.pids: dict[str, int] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    # -- up and down

    def start(self) -> "SlurmLab":
        """Start all daemons, or none: after a failure, stop those that have started."""
        self._prepare()
        self._start_guard()
        try:
            self.start_munge()
            self.start_accounting()
            self._register()
            self.start_controller()
            for node in self.nodes:
                self._start_slurmd(node)
            self.wait(self._nodes_idle, "the nodes to be idle", 60)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all daemons, jobs and their processes."""
        end_lab(self.folder)
        for child in [*self._children.values(), *([self._guard] if self._guard else [])]:
            if child is self._guard:
                child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=10)
        self._children, self._guard, self.pids = {}, None, {}

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("munge", "state", "spool", "log", "db"):
            (self.folder / name).mkdir(exist_ok=True)
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir(exist_ok=True)
        self.folder.chmod(0o755)
        controller, accounting, database, *nodes = _free_ports(3 + len(self.nodes))
        self._ports = Ports(controller=controller, accounting=accounting, database=database, nodes=tuple(nodes))
        password = secrets.token_hex(16)
        self._password = password
        settings = slurm_conf(self.folder, self.nodes, self._ports, self.cpus) + self.slurm.settings()
        self.conf.write_text(settings + self.extra)
        self.version = self.ask("sbatch", "--version").stdout.split()[-1]
        if tuple(map(int, self.version.split(".")[:2])) >= (23, 11):  # an older one does not know this plugin
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        dbd = self.folder / "slurmdbd.conf"
        dbd.touch(mode=0o600)
        dbd.write_text(slurmdbd_conf(self.folder, self._ports, password) + self.slurm.settings())
        key = self.folder / "munge" / "key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(128))

    # -- single daemons

    def start_munge(self) -> None:
        munge = self.folder / "munge"
        self._spawn(
            "munged", "munged", "--foreground", "--force", f"--socket={munge / 'socket'}",
            f"--key-file={munge / 'key'}", f"--pid-file={munge / 'pid'}", f"--log-file={munge / 'log'}",
            f"--seed-file={munge / 'seed'}",
        )  # fmt: skip
        self.wait(lambda: self.ask("munge", "-n", "--socket", str(munge / "socket")).returncode == 0, "munged")

    def start_accounting(self) -> None:
        """Start MariaDB and slurmdbd."""
        data = self.folder / "db" / "data"
        if not data.exists():
            made = self.ask(
                "mariadb-install-db", "--no-defaults", f"--datadir={data}", f"--tmpdir={data.parent}", "--user=root",
                "--auth-root-authentication-method=normal", "--skip-test-db",
            )  # fmt: skip
            if made.returncode != 0:
                raise LabError(f"mariadb-install-db failed: {made.stderr[-300:]}")
        grant = self.folder / "db" / "init.sql"
        grant.touch(mode=0o600)
        grant.write_text(
            "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
            f"CREATE OR REPLACE USER slurm@127.0.0.1 IDENTIFIED BY '{self._password}';\n"
            "GRANT ALL ON slurm_acct_db.* TO slurm@127.0.0.1;\n"
        )
        self._spawn(
            "mariadbd", "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--tmpdir={data.parent}",
            "--bind-address=127.0.0.1",
            f"--port={self._ports.database}", f"--socket={self.folder / 'db' / 'socket'}", f"--init-file={grant}",
            f"--pid-file={self.folder / 'db' / 'pid'}", "--innodb-flush-log-at-trx-commit=0", "--skip-name-resolve",
            "--innodb-buffer-pool-size=64M",
        )  # fmt: skip
        self.wait(lambda: _answers(self._ports.database), "mariadbd", 60)
        self._spawn("slurmdbd", "slurmdbd", "-D")
        self.wait(lambda: _answers(self._ports.accounting), "slurmdbd", 60)

    def stop_accounting(self) -> None:
        """Kill slurmdbd and its database."""
        for name in ("slurmdbd", "mariadbd"):
            self._kill(name)

    def start_controller(self) -> None:
        state = self.folder / "state"
        # Slurm 26.05 refuses to start without this file, which it writes some minutes after its first start.
        unsaved = (state / "job_state").exists() and not (state / "assoc_usage").exists()
        self._spawn("slurmctld", "slurmctld", "-D", *(["-i"] if unsaved else []))
        self.wait(lambda: self.ask("scontrol", "ping").stdout.count("UP") > 0, "slurmctld", 60)

    def kill_controller(self) -> None:
        self._kill("slurmctld")

    def pause_controller(self) -> None:
        """Stop slurmctld until `resume_controller`."""
        os.kill(self.pids["slurmctld"], signal.SIGSTOP)

    def resume_controller(self) -> None:
        os.kill(self.pids["slurmctld"], signal.SIGCONT)

    def _start_slurmd(self, node: str) -> None:
        self._spawn(f"slurmd-{node}", "slurmd", "-D", "-N", node, *self.slurm.step_daemon())

    def kill_node(self, node: str, *, ranks_too: bool = True) -> None:
        """Kill a node's slurmd and slurmstepds, and with `ranks_too` the processes that they started."""
        work = processes.job_processes(self.conf, node) if ranks_too else []
        self._kill(f"slurmd-{node}")
        # A slurmstepd uses its node's spool folder; from 24.11 on it only has the log open.
        for place in (self.folder / "spool" / node, self.folder / "log" / f"slurmd-{node}.log"):
            processes.send(processes.using(place), signal.SIGKILL)
        processes.send(work, signal.SIGKILL)

    def cut_power(self, node: str) -> None:
        """Kill all processes of a node at the same time, so that none can report the end of another."""
        work = processes.job_processes(self.conf, node)
        steps = processes.steps_of(work)
        daemon = self.pids[f"slurmd-{node}"]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            processes.send([daemon, *steps, *work], number)
        self._kill(f"slurmd-{node}")

    def start_node(self, node: str) -> None:
        """Restart the node's slurmd and return the node to service."""
        self._start_slurmd(node)

        def back() -> bool:
            self.ask("scontrol", "update", f"nodename={node}", "state=resume")
            return self.node_state(node) in ("idle", "mix", "alloc")  # a job that waits takes it at once

        self.wait(back, f"{node} to be idle", 60)

    # -- questions

    def environment(self) -> dict[str, str]:
        """Return the variables of a user's shell on this cluster."""
        first = [str(self.slurm.programs)] if self.slurm.programs else []
        path = ":".join([*first, os.environ.get("PATH", os.defpath), _SBIN])
        return {"SLURM_CONF": str(self.conf), "PATH": path}

    def ask(self, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command as a user would."""
        environ = {**os.environ, **self.environment()}
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )

    def nodes_without_daemon(self) -> list[str]:
        """Return the nodes that have been killed and not started again."""
        return [node for node in self.nodes if f"slurmd-{node}" not in self.pids]

    def node_state(self, node: str) -> str:
        return self.ask("sinfo", "-h", "-N", "-n", node, "-p", "low", "-o", "%t").stdout.strip()

    def nodes_of(self, job: str) -> list[str]:
        """Return the names of a job's nodes."""
        listed = self.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%N").stdout.strip()
        return self.ask("scontrol", "show", "hostnames", listed).stdout.split() if listed else []

    # -- inside

    def _register(self) -> None:
        def known() -> bool:
            done = self.ask("sacctmgr", "-i", "add", "cluster", "lab")
            return done.returncode == 0 or "already exists" in done.stdout + done.stderr

        self.wait(known, "slurmdbd to know the cluster", 60)

    def _nodes_idle(self) -> bool:
        states = self.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%t").stdout.split()
        return states == ["idle"] * len(self.nodes)

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            child = subprocess.Popen(
                command, env={**os.environ, **self.environment()}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self._children[name], self.pids[name] = child, child.pid

    def _kill(self, name: str) -> None:
        child = self._children.pop(name, None)
        self.pids.pop(name, None)
        if child is not None:
            child.kill()
            child.wait(timeout=20)

    def wait(self, ready: Callable[[], bool], what: str, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            dead = [name for name, child in self._children.items() if child.poll() is not None]
            if dead or time.monotonic() > deadline:
                why = f"{', '.join(dead)} ended" if dead else f"not within {timeout:.0f} s"
                raise LabError(f"waiting for {what}: {why}; see {self.folder / 'log'}")
            time.sleep(0.05)

    def _start_guard(self) -> None:
        """Start a process that ends the lab if this process dies first, even by SIGKILL."""
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.lab", "guard", str(self.folder), str(os.getpid())],
            cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


@contextlib.contextmanager
def temporary_lab(
    suite: str, prepare: Callable[[SlurmLab], None] = lambda lab: None, *, nodes: int = 4, extra: str = ""
) -> Iterator[SlurmLab]:
    """A lab in a folder that ordinary users can enter; skips without Slurm. `prepare` is called before the start."""
    folder = Path(tempfile.mkdtemp(prefix="orch-slurm-")).resolve()  # pytest's own folders are closed to other users
    folder.chmod(0o755)
    try:
        lab = SlurmLab(folder, nodes, extra=extra.format(folder=folder), suite=suite)
        prepare(lab)
        lab.start()
    except (LabError, SuiteError) as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no Slurm lab: {error}")
    yield lab
    lab.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def end_lab(folder: Path) -> None:
    """End all daemons, steps and jobs that use the lab's folder; no record of them is needed."""
    folder = folder.resolve()
    for _ in range(20):
        found = set(processes.using(folder)) | set(processes.job_processes(folder / "slurm.conf"))
        found = {pid for pid in found if _is_labs(pid)}
        if not found:
            return
        processes.send(found, signal.SIGKILL)
        processes.wait_gone(found, 2)


def _is_labs(pid: int) -> bool:
    """Return whether this is a Slurm daemon or job; a shell or an editor may also use the folder."""
    with contextlib.suppress(OSError):
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix("-wlm")  # Debian's alternatives
        daemons = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scancel")
        return name in daemons or "SLURMD_NODENAME" in processes.environment_of(pid)
    return False


def _guard(folder: Path, owner: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)
    while os.getppid() == owner:
        time.sleep(0.5)
    end_lab(folder)


def main(arguments: list[str]) -> int:
    """Run `start FOLDER` or `stop FOLDER`, for manual experiments."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.lab", description=__doc__)
    parser.add_argument("verb", choices=("start", "stop", "guard"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("owner", type=int, nargs="?", default=0)
    parser.add_argument("--suite", choices=SUITES, default=MACHINE, help="Debian suite with the Slurm to start")
    chosen = parser.parse_args(arguments)
    if chosen.verb == "guard":
        _guard(chosen.folder, chosen.owner)
    elif chosen.verb == "stop":
        end_lab(chosen.folder)
    else:
        lab = SlurmLab(chosen.folder, suite=chosen.suite).start()
        sys.stdout.write("".join(f"export {key}={json.dumps(value)}\n" for key, value in lab.environment().items()))
        sys.stdout.write("# the lab ends with this process: Ctrl-C\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        lab.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
