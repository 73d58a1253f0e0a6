"""Two ordinary users of one group with a group-writable project folder, created by root and removed at the end."""

import grp
import json
import os
import pwd
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
_verbs: dict[int, "subprocess.Popen[str]"] = {}
"""Processes by the uid of their user; they end with the town."""


@dataclass(frozen=True)
class Person:
    """One account; `home` is private, `python` an interpreter with our packages that it may start."""

    name: str
    uid: int
    gid: int
    shared: int
    home: Path
    python: Path

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of a minimal login shell."""
        return {
            "HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "PATH": os.environ["PATH"],
            "ORCH_HOME": str(self.home / "orch"), "ORCH_SITE_CONFIG": "", "OMP_NUM_THREADS": "1", **extra,
        }  # fmt: skip

    def run(self, words: Sequence[str], **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a program as this user, with a group-writable umask as on many clusters."""
        return subprocess.run(
            list(words), env=self.environment(**extra), cwd=self.home, user=self.uid, group=self.gid,
            extra_groups=[self.shared], umask=0o002, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def orch(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a verb as a fork of this user's process with all verbs imported."""
        verbs = _verbs.get(self.uid) or _verbs.setdefault(self.uid, self._start_verbs())
        assert verbs.stdin is not None
        assert verbs.stdout is not None
        out, err = self.home / "verb.out", self.home / "verb.err"
        order = {"words": words, "environ": self.environment(**extra), "out": str(out), "err": str(err)}
        verbs.stdin.write(f"{json.dumps(order)}\n")
        verbs.stdin.flush()
        assert select.select([verbs.stdout], [], [], 120)[0], f"orch {' '.join(words)} does not end"
        return subprocess.CompletedProcess(words, int(verbs.stdout.readline()), out.read_text(), err.read_text())

    def _start_verbs(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(self.python), "-P", "-m", "tests.security.forked_verbs"], env=self.environment(ROOM="-" * 10_000),
            cwd=self.home, user=self.uid, group=self.gid, extra_groups=[self.shared], umask=0o002,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def ask(self, *words: str) -> Any:
        done = self.orch(*words, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)["data"]

    def code(self, text: str, *arguments: object) -> str:
        """Return the output of a Python program with this user's permissions."""
        done = self.run([str(self.python), "-S", "-c", text, *map(str, arguments)])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@dataclass(frozen=True)
class Town:
    """Ann, who owns the runs, Bob, who is in her group, and the project's folder."""

    folder: Path
    project: Path
    executed: Path
    ann: Person
    bob: Person

    def was_executed(self) -> list[str]:
        """Return the marks of Bob's code that ran as Ann."""
        return sorted(path.name for path in self.executed.iterdir() if path.stat().st_uid == self.ann.uid)


@contextmanager
def town() -> Iterator[Town]:
    """Create the users; skip the test if that is impossible."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("useradd", "userdel", "groupadd", "groupdel"))):
        pytest.skip("only root can make two users, with useradd")
    group = f"orchg{os.getpid()}"
    names = [f"orch{who}{os.getpid()}" for who in ("a", "b")]
    folder = Path(tempfile.mkdtemp(prefix="orch-town-"))  # pytest's own folders let nobody else in
    folder.chmod(0o755)
    try:
        _done("groupadd", group)
        for name in names:
            _done("useradd", "--no-create-home", "--home-dir", str(folder / name), "--groups", group, name)
        yield _settled(folder, group, names)
    finally:
        _end_processes(names)
        for name in names:
            subprocess.run(["userdel", name], capture_output=True, check=False)
        subprocess.run(["groupdel", group], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _end_processes(names: Sequence[str]) -> None:
    """End all processes of these users, because an account with processes cannot be deleted."""
    uids = {pwd.getpwnam(name).pw_uid for name in names if name in {entry.pw_name for entry in pwd.getpwall()}}
    for uid in uids & _verbs.keys():
        verbs = _verbs.pop(uid)
        verbs.kill()
        verbs.communicate()
    while left := [process for process in psutil.process_iter(["uids"]) if _uid(process) in uids]:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)


def _uid(process: psutil.Process) -> int:
    told = process.info["uids"]
    return -1 if told is None or process.status() == psutil.STATUS_ZOMBIE else int(told.real)


def _done(*words: str) -> None:
    subprocess.run(words, capture_output=True, check=True)


def _settled(folder: Path, group: str, names: Sequence[str]) -> Town:
    shared = grp.getgrnam(group).gr_gid
    project, executed = folder / "project", folder / "executed"
    project.mkdir()
    os.chown(project, 0, shared)
    project.chmod(0o2770)  # as sites make the folder of a project
    executed.mkdir()
    executed.chmod(0o1777)
    people = []
    for name in names:
        account = pwd.getpwnam(name)
        home = folder / name
        home.mkdir(mode=0o700)
        os.chown(home, account.pw_uid, account.pw_gid)
        python = _python(folder / "python", account.pw_uid)
        people.append(Person(name, account.pw_uid, account.pw_gid, shared, home, python))
    return Town(folder, project, executed, *people)


def _python(folder: Path, uid: int) -> Path:
    """Return the tests' interpreter, or the system's of the same version, with the tests' packages."""
    if _starts(Path(sys.executable), uid):
        return Path(sys.executable)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    system = Path("/usr/bin") / version
    made = folder / "bin" / "python"
    if not made.exists():
        made.parent.mkdir(parents=True)
        made.symlink_to(system)
        (folder / "pyvenv.cfg").write_text(f"home = {system.parent}\ninclude-system-site-packages = false\n")
        packages = folder / "lib" / version / "site-packages"
        packages.mkdir(parents=True)
        own = sysconfig.get_path("purelib")
        (packages / "tests.pth").write_text(f"import site; site.addsitedir({own!r})\n{ROOT}\n")
    if not _starts(made, uid):
        pytest.skip(f"neither {sys.executable} nor {system} can be started by an ordinary user")
    return made


def _starts(python: Path, uid: int) -> bool:
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", "import orchestrator.home, submitit"], user=uid, group=uid, extra_groups=[],
            cwd="/", env={"PATH": os.environ["PATH"]}, capture_output=True, check=False,
        )  # fmt: skip
    except OSError:
        return False
    return done.returncode == 0
