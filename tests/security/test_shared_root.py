"""Bob, who is in Ann's group, attacks her run in a group-writable folder."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.user import SLOW_WORKLOAD, TINY
from tests.security.people import ROOT, Town, town
from trainer.agent.control.tcp_transport import hello_seal, new_nonce
from trainer.protocol.run_dir import RunDir

SMALL = [
    "cluster.kind=local", "cluster.nodes=1", "cluster.ranks_per_node=1", "parallel.dp_shard=0", "parallel.tp=1",
    *TINY, "checkpoint.every=4", "train.steps=1000000", "restore_tests.every=off",
]  # fmt: skip
BOBS = ROOT / "tests" / "security" / "bobs_folder.py"
LOCAL = {
    "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "1", "SUBMITIT_LOCAL_NTASKS": "1",
    "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0",
}  # fmt: skip
"""Variables of a task of a local job."""


@dataclass(frozen=True)
class Live:
    """Ann's run, which trains during Bob's attacks."""

    town: Town
    name: str
    job_name: str

    @property
    def folder(self) -> RunDir:
        return RunDir(self.town.project / self.name)

    @property
    def aside(self) -> RunDir:
        """Folder to which Bob moves the run."""
        return RunDir(self.town.project / "aside")

    def step(self, folder: RunDir | None = None) -> int:
        try:
            return int(json.loads((folder or self.folder).attempt(1).heartbeat.read_text())["step"])
        except (FileNotFoundError, ValueError, KeyError):
            return 0

    def goes_on(self, folder: RunDir | None = None) -> None:
        """Wait until it has trained further."""
        before = self.step(folder)
        until(lambda: self.step(folder) > before, "it trains on")

    def status(self) -> dict[str, Any]:
        return dict(self.town.ann.ask("status", self.name)[0])

    def until_told(self, text: str, *, told: bool = True) -> None:
        """Wait, as Ann, until the reason in the registry contains this text, or no longer does."""
        self.town.ann.code(WAIT, self.town.ann.home / "orch" / "registry.db", self.name, text, int(told))

    def processes(self) -> list[int]:
        """Return Ann's processes."""
        uid = self.town.ann.uid
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _owner(name) == uid]


WAIT = """
import sqlite3, sys, time
path, run, text, told = sys.argv[1:]
registry = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)
while (text in registry.execute("SELECT reason FROM runs WHERE name = ?", [run]).fetchone()[0]) is (told == "0"):
    time.sleep(0.1)
"""


def _owner(pid: str) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def until(true: Any, what: str, seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, what
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def place() -> Iterator[Town]:
    with town() as made:
        yield made


@pytest.fixture(scope="module")
def live(place: Town) -> Live:
    ann, slow, root = place.ann, place.ann.home / "slow", f"cluster.root={place.project}"
    ann.code("import sys; open('slow_llama.py', 'w').write(sys.argv[1])", SLOW_WORKLOAD.read_text())
    slowly = [
        "workload.target=slow_llama:SlowLlama", f"workload.path=[{ann.home}]",
        f"+workload.args.while_there={slow}", "+workload.args.seconds=1.0",
    ]  # fmt: skip
    tiers = f"checkpoint.tiers=[{{path: {place.project}/tier, keep: 2}}, {{path: run, every: 8, keep: 2}}]"
    made = ann.ask("submit", "tiny-gpt", root, "cluster.shared_root=true", "name=live", *SMALL, *slowly, tiers)
    name = made["run"]
    intent = json.loads((place.project / name / "attempts/001/intent.json").read_text())
    run = Live(place, name, intent["job_name"])
    until(lambda: run.step() > 24, "it trains")
    slow.touch()
    return run


def bobs_folder(place: Town, where: Path, name: str, job_name: str = "orch-x-1-1-0011aabb") -> None:
    done = place.bob.run([str(place.bob.python), "-S", str(BOBS), *map(str, (where, name, place.executed, job_name))])
    assert done.returncode == 0, done.stderr


# -- before there is a run ---------------------------------------------------------------------------------------------


def test_a_root_that_others_can_write_is_refused_and_the_hint_names_the_key(place):
    done = place.ann.orch("submit", "tiny-gpt", f"cluster.root={place.project}", *SMALL)
    assert done.returncode == 4
    assert f"{place.project} can be changed by group orchg" in done.stderr
    assert "cluster.shared_root=true uses it anyway" in done.stderr
    assert list(place.project.iterdir()) == []


def test_a_root_behind_a_link_of_bobs_is_refused(place):
    link = place.executed / "runs"  # a sticky folder, as /tmp
    place.bob.code("import os, sys; os.symlink(sys.argv[1], sys.argv[2])", place.ann.home, link)
    try:
        done = place.ann.orch("submit", "tiny-gpt", f"cluster.root={link}/runs", *SMALL)
        assert done.returncode == 4
        assert f"{link} can be changed by {place.bob.name}" in done.stderr
    finally:
        link.unlink()


@pytest.mark.parametrize("variable", ["ORCH_HOME", "ORCH_REGISTRY", "XDG_STATE_HOME"])
def test_a_state_folder_that_bob_can_write_is_not_used(place, variable):
    where = place.project / "state"
    value = {"ORCH_REGISTRY": str(where / "registry.db")}.get(variable, str(where))
    where.mkdir()
    where.chmod(0o2777)
    try:
        hidden = {} if variable == "ORCH_HOME" else {"ORCH_HOME": ""}
        done = place.ann.orch("status", **hidden, **{variable: value})
        assert done.returncode == 4, done.stderr
        assert "can be changed by" in done.stderr
        assert [path.name for path in where.rglob("*.db*")] == []
    finally:
        for path in sorted(where.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        where.rmdir()


def test_tokens_that_bob_has_put_where_anns_would_be(place):
    planted = place.project / f".data-{place.ann.uid}"
    place.bob.code("import os, sys; os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)", planted)
    text = place.ann.home / "text"
    place.ann.code("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('words ' * 9999)", text)
    root = f"cluster.root={place.project}"
    words = [root, "cluster.shared_root=true", "name=data", f"data.text=[{text}]", *SMALL]
    done = place.ann.orch("submit", "tiny-gpt", *words)
    assert done.returncode == 4
    assert f"{planted} belongs to {place.bob.name}" in done.stderr
    place.bob.code("import shutil, sys; shutil.rmtree(sys.argv[1])", planted)


def test_a_forged_run_is_not_taken_in_by_a_rebuild(place):
    forged = place.project / "forged-1"
    bobs_folder(place, forged, "forged-1")
    done = place.ann.orch("db", "rebuild", "--root", str(place.project), ORCH_HOME=str(place.ann.home / "rebuilt"))
    assert f"{forged} belongs to {place.bob.name}" in done.stderr, done.stdout + done.stderr
    assert "forged-1" not in place.ann.orch("status", "--all", ORCH_HOME=str(place.ann.home / "rebuilt")).stdout


EACH = """
import os, sys, traceback
from trainer.agent.main import main
for run in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = main([run, f"{run}/attempts/001/submission"])
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_jobs_load_nothing_from_exchanged_folders(place):
    bob, folder, link, to_anns_own = place.bob, *(place.project / f"found-{number}" for number in (1, 2, 3))
    bobs_folder(place, folder, folder.name)
    bobs_folder(place, bob.home / "link", link.name)
    bob.code("import os, sys; os.symlink(*sys.argv[1:])", bob.home / "link", link)
    bob.home.chmod(0o755)
    bob.code("import os, sys; os.symlink(*sys.argv[1:])", place.ann.home, to_anns_own)
    words = [str(place.ann.python), "-P", "-u", "-c", EACH, str(folder), str(link), str(to_anns_own)]
    done = place.ann.run(words, **LOCAL)
    assert done.stdout.split() == ["78"] * 3, done.stderr
    for run in (folder, link, to_anns_own):
        assert f"refuses to start: {run} " in done.stderr
    assert place.was_executed() == []


EXCHANGE = """
import ctypes, os, sys
libc, ours, theirs = ctypes.CDLL(None), *map(os.fsencode, sys.argv[1:3])
while not os.path.exists(sys.argv[3]):
    libc.renameat2(-100, ours, -100, theirs, 2)
"""
PAYLOAD = """
import os, sys
from pathlib import Path
from submitit.core.utils import DelayedSubmission
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
for part in (folder, *folder.parents[:3]):
    part.chmod(0o700)
DelayedSubmission(print, "this is Ann's").dump(folder / "1_submitted.pkl")
"""
TRIES = """
import os, sys, traceback
from trainer.agent.main import main
for _ in range(8):
    print("try", flush=True)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = main(sys.argv[1:])
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_folders_that_are_exchanged_all_the_time_never_run_bobs_payload(place):
    run, other, over = place.project / "swapped-1", place.project / "swapped-bobs", place.executed / "over"
    place.ann.run([str(place.ann.python), "-c", PAYLOAD, str(run / "attempts/001/submission")])
    bobs_folder(place, other, run.name)
    bob = subprocess.Popen(
        [str(place.bob.python), "-S", "-c", EXCHANGE, str(run), str(other), str(over)], user=place.bob.uid,
        group=place.bob.gid, extra_groups=[place.bob.shared], env=place.bob.environment(), cwd="/",
    )  # fmt: skip
    words = [str(place.ann.python), "-P", "-u", "-c", TRIES, str(run), f"{run}/attempts/001/submission"]
    try:
        until(lambda: run.stat().st_uid == place.bob.uid, "Bob has begun")
        done = place.ann.run(words, **LOCAL)
        tries = done.stdout.split("try\n")[1:]
        assert len(tries) == 8, done.stderr
        for told in tries:
            assert ("this is Ann's" in told) is told.endswith("code 0\n"), done.stdout + done.stderr
    finally:
        over.touch()
        bob.wait(30)
        over.unlink()
    assert place.was_executed() == []


# -- what Bob tries with the files and processes of a run that trains --------------------------------------------------

ATTACKS = {
    "read its config": "open(f'{run}/config.json').read()",
    "read the token of its control port": "open(f'{run}/attempts/001/coordinator.json').read()",
    "list its folder": "os.listdir(run)",
    "replace its config": "os.rename('mine', f'{run}/config.json')",
    "replace its payload": "[os.rename('mine', f'{run}/attempts/001/submission/{n}_submitted.pkl') for n in jobs]",
    "write a request": "open(f'{run}/requests/stop.001.00000000.json', 'w')",
    "link a request": "os.link('mine', f'{run}/requests/stop.001.00000000.json')",
    "point its requests elsewhere": "os.rename(f'{run}/requests', 'requests'); os.symlink(home, f'{run}/requests')",
    "write GO": "open(f'{run}/attempts/001/GO', 'w')",
    "write its outcome": "open(f'{run}/attempts/001/outcome.json', 'w')",
    "put a module beside its processes": "open(f'{run}/sitecustomize.py', 'w')",
    "replace its code": "os.makedirs(f'{run}/code/0')",
    "put a checkpoint there": "os.makedirs(f'{run}/checkpoints/step-00000099.001-00000000')",
    "put a FIFO in place of a log": "os.mkfifo(f'{run}/attempts/001/logs/rank-00001.log')",
    "open its folder to all": "os.chmod(run, 0o777)",
    "remove its folder": "os.rmdir(run)",
    "write the registry": "open(f'{state}/registry.db', 'r+b')",
    "write the registry's log": "open(f'{state}/registry.db-wal', 'wb')",
    "take the registry's lock": "open(f'{state}/registry.db.lock', 'w')",
    "put a local job into the index": "open(f'{state}/local-jobs/x.json', 'w')",
    "replace the state folder": "os.rename(state, f'{state}.old')",
    "read a secret in the environment of its processes": "[open(f'/proc/{p}/environ').read() for p in pids]",
    "read the memory of its processes": "[open(f'/proc/{p}/mem', 'rb') for p in pids]",
    "come in by their descriptors": "[os.listdir(f'/proc/{p}/fd') for p in pids]",
    "come in by their current folder": "[os.listdir(f'/proc/{p}/cwd') for p in pids]",
    "signal its processes": "[os.kill(p, 9) for p in pids]",
    "reach the sockets of its ranks": "[os.listdir(f) for f in sockets]",
}
TRY = """
import errno, json, os, sys
told = json.loads(sys.argv[1])
run, home, state, pids, sockets = (told[key] for key in ("run", "home", "state", "pids", "sockets"))
jobs = range(1, 9)
os.chdir(told["own"])
answers = {}
for name, attack in told["attacks"].items():
    open("mine", "w").close()
    try:
        answers[name] = f"worked: {eval(compile(attack, '', 'eval')) if ';' not in attack else exec(attack)}"
    except OSError as error:
        is_denied = isinstance(error, PermissionError) or error.errno == errno.ENOTEMPTY
        answers[name] = "denied" if is_denied else repr(error)
print(json.dumps(answers))
"""


def owner(path: Path) -> int | None:
    """Return the owner's uid; None if the path is gone, because other tests use such names too."""
    try:
        return path.stat().st_uid
    except FileNotFoundError:
        return None


def test_bob_can_read_change_and_signal_nothing_of_the_run(live):
    place = live.town
    told = {
        "run": str(live.folder.path), "home": str(place.bob.home), "state": str(place.ann.home / "orch"),
        "pids": live.processes(), "attacks": ATTACKS, "own": str(place.bob.home),
        "sockets": [str(path) for path in Path("/tmp").glob("orch-*") if owner(path) == place.ann.uid],
    }  # fmt: skip
    assert told["pids"]
    assert told["sockets"]
    assert json.loads(place.bob.code(TRY, json.dumps(told))) == dict.fromkeys(ATTACKS, "denied")


# -- the control port --------------------------------------------------------------------------------------------------


def forged_hello(challenge: str, token: str) -> bytes:
    told = {"say": "hello", "nonce": new_nonce(), "node": 0, "name": "x", "attempt": 1}
    return hello_seal(token, challenge).sign(json.dumps(told).encode()) + b"\n"


HELLOS = {
    "nothing": lambda challenge: b"",
    "garbage": lambda challenge: os.urandom(3000).replace(b"\n", b"") + b"\n",
    "a hello without a proof": lambda challenge: b'{"say":"hello","node":0,"name":"x","attempt":1}\n',
    "a wrong token": lambda challenge: forged_hello(challenge, "0" * 64),
    "no token": lambda challenge: forged_hello(challenge, ""),
    "the challenge itself": lambda challenge: json.dumps({"say": "challenge", "nonce": challenge}).encode() + b"\n",
    "a line without an end": lambda challenge: b"x" * (1 << 20),
    "an order": lambda challenge: b"0" * 64 + b' {"say":"end","code":0,"reason":"Bob"}\n',
}


def test_messages_of_strangers_do_not_disturb_the_run(live):
    found = json.loads(live.folder.attempt(1).coordinator.read_text())
    address = found["host"], found["port"]
    silent = [socket.create_connection(address, 10) for _ in range(1000)]
    for make in HELLOS.values():
        with socket.create_connection(address, 10) as connection:
            challenge = json.loads(connection.makefile().readline())["nonce"]
            try:
                connection.sendall(make(challenge))
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1 << 16) == b""
            except OSError:  # it has hung up already
                continue
    live.goes_on()
    for connection in silent:
        connection.close()
    assert live.status()["state"] == "RUNNING"


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_tiers_have_their_own_names_in_events_and_lists(live):
    ann = live.town.ann

    def found() -> list[dict[str, Any]] | None:
        known = ann.ask("ckpt", "ls", live.name, "--all")
        # A busy machine skips saves, so no certain step exists.
        return known if sum(each["trust"] == "DELETED" for each in known) >= 3 else None

    shown = json.dumps([until(found, "three checkpoints are known to be deleted"), ann.ask("show", live.name)])
    assert "/proc/" not in shown
    assert str(live.folder.path / "checkpoints") in shown
    assert str(live.town.project / "tier") in shown


# -- Bob moves the run's folder away, which a group's folder allows him ------------------------------------------------


def test_an_exchanged_run_folder_is_reported(live):
    place, run = live.town, live.folder.path
    ann = place.ann
    place.bob.code("import os, sys; os.rename(*sys.argv[1:])", run, live.aside.path)
    bobs_folder(place, run, live.name, live.job_name)
    live.goes_on(live.aside)
    live.until_told(place.bob.name)  # the controller says whose folder it is
    told = live.status()
    assert place.bob.name in told["reason"]
    assert told["state"] == "RUNNING", "Bob's outcome is not read"
    for verb in (["logs", live.name], ["attach", live.name], ["ckpt", "save", live.name]):
        done = ann.orch(*verb)
        if done.returncode != 2:
            assert done.returncode == 4, (verb, done.stdout, done.stderr)
            assert f"belongs to {place.bob.name}" in done.stderr
    place.bob.code(
        "import os, shutil, sys; shutil.rmtree(sys.argv[1]); os.rename(*sys.argv[2:0:-1])", run, live.aside.path
    )
    live.goes_on()
    live.until_told(place.bob.name, told=False)  # it sees the run's own folder again
    assert ann.orch("cancel", live.name).returncode == 0
    assert ann.orch("wait", live.name).returncode == 10, "CANCELLED: it obeys Ann"
    assert place.was_executed() == []
    made = [*run.rglob("*"), *(place.project / "tier").rglob("*")]
    writable = [path for path in made if path.lstat().st_mode & 0o022 and not path.is_symlink()]
    assert writable == [], "a umask of 0002 made nothing that the group may write"
