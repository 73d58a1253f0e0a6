"""A staged archive that another process unpacks, and a folder for it that cannot be used."""

import hashlib
import tarfile
from pathlib import Path

import pytest

from tests.end_to_end.user import User
from trainer.agent.nodes.node_disk import FolderLock, make_own_folder

pytestmark = pytest.mark.multi
PROGRAM = ["command=[python, -c, 'pass']", "cluster.nodes=1", "cluster.ranks_per_node=1"]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "data").write_text("x")
    with tarfile.open(tmp_path / "env.tar", "w") as file:
        file.add(tmp_path / "data", "data")
    return tmp_path / "env.tar"


def test_a_wait_for_another_process_is_the_runs_reason(user: User, archive: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    above = make_own_folder("cluster.stage.to", str(tmp_path / "disk"), {})
    lock = FolderLock.own(above / f"env-{digest[:16]}")
    staged = [f"cluster.stage.archive={archive}", f"cluster.stage.to={tmp_path / 'disk'}"]
    run = user.submit("torchrun-script", *PROGRAM, *staged)["run"]
    words = f"local-0 waits for another process that unpacks {archive} (lock {above}/.env-{digest[:16]}.lock); job "
    user.until(lambda: user.status(run)["reason"].startswith(words), 60, "the wait in the reason")
    lock.release()
    assert user.wait(run) == 0


def test_a_folder_that_no_node_can_use_holds_the_run(user: User, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").touch()
    staged = [f"cluster.stage.archive={archive}", f"cluster.stage.to={tmp_path / 'disk'}"]
    run = user.submit("torchrun-script", *PROGRAM, *staged)["run"]
    assert user.wait(run) == 8
    status = user.status(run)
    assert status["state"] == "HELD"
    assert status["reason"].startswith(f"on every node: cluster.stage.to={tmp_path / 'disk'} cannot be used on this")
    assert "`orch resume RUN cluster.stage.to=FOLDER`" in status["reason"]
