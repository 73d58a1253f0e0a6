"""A registry and a run directory written by an older version, read and continued by this one.

`older_release/run.tar.xz`: two ranks trained a tiny model on a licence's text until `orch cancel` after step 559 of
4000. Paths and the host's name are placeholders, except in `config.json`, which has a digest.
"""

import shlex
import socket
import sqlite3
import sys
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from tests.end_to_end.user import User
from trainer.protocol.run_dir import RunDir

PACKED = Path(__file__).parent / "older_release" / "run.tar.xz"
INSTALL = Path(__file__).parents[2]
RUN, STOPPED, STEPS = "older-1", 559, 562

pytestmark = pytest.mark.multi


def unpack(folder: Path) -> None:
    """Write the files of the older version, as if it had been installed where this one is."""
    with tarfile.open(PACKED) as packed:
        packed.extractall(folder, filter="data")
    places = {"@PYTHON@": sys.executable, "@INSTALL@": INSTALL, "@HOME@": folder, "@HOST@": socket.gethostname()}
    for file in folder.rglob("*"):
        if (
            not file.is_file()
            or file.name in ("config.json", "manifest.json", ".metadata")
            or file.suffix in (".distcp", ".bin")
        ):
            continue
        text = file.read_text()
        for name, value in places.items():
            text = text.replace(name, str(value))
        file.write_text(text)


@pytest.fixture
def older(user: User) -> User:
    """A user with runs of the older version."""
    unpack(user.folder)
    user.root = user.folder / "orch-runs"
    home = user.folder / "home"
    home.mkdir(mode=0o700)
    with closing(sqlite3.connect(home / "registry.db")) as registry:
        registry.executescript((user.folder / "registry.sql").read_text())
    return user


def test_its_registry_run_and_checkpoints_are_read(older: User) -> None:
    row = older.status(RUN)
    assert len(list((older.folder / "home").glob("registry.db.*.bak"))) == 1, "upgraded after a backup"
    assert (row["state"], row["step"], row["last_checkpoint"]["step"]) == ("CANCELLED", STOPPED, STOPPED)
    assert older.run("ckpt", "verify", RUN, "--level", "4").returncode == 0
    assert [line for line in older.run("events", RUN).stdout.splitlines() if f"saved step {STOPPED}" in line]


def test_its_run_goes_on_from_its_checkpoint(older: User) -> None:
    (data,) = older.root.glob(".data*/*")
    refused = older.run("resume", RUN, f"data.path={data}")  # its config names the folder as it was then
    assert refused.returncode == 4, refused.stderr
    assert "code.orch differs from the run's training" in refused.stderr
    command = shlex.split(refused.stderr.strip().splitlines()[-1])
    asked = older.run(*command[1:], f"train.steps={STEPS}")
    assert asked.returncode == 0, asked.stderr
    assert older.wait(RUN) == 0
    assert [attempt["attempt"] for attempt in older.show(RUN)["attempts"]] == [1, 2]
    assert [line["step"] for line in older.steps(RUN)] == list(range(1, STEPS + 1))


def test_its_run_directory_is_enough(older: User) -> None:
    (older.folder / "home" / "registry.db").unlink()
    rebuilt = older.run("db", "rebuild", str(older.root))
    assert rebuilt.returncode == 0, rebuilt.stderr
    row = older.status(RUN)
    assert (row["state"], row["step"], row["last_checkpoint"]["step"]) == ("CANCELLED", STOPPED, STOPPED)
    assert [attempt.number for attempt in RunDir(older.root / RUN).all_attempts()] == [1]
