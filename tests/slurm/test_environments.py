"""A staged interpreter, caches and binding on the nodes of the real Slurm."""

import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from tests.end_to_end.user import User

pytestmark = [pytest.mark.slurm, pytest.mark.multi]

PROGRAM = """import json, os, sys, tempfile, time
names = ("STAGED_BY", "ORCH_STAGE", "TRITON_CACHE_DIR", "SLURMD_NODENAME")
found = {name: os.environ.get(name) for name in names} | {"temp": tempfile.gettempdir()}
found["cores"] = sorted(os.sched_getaffinity(0))
open("note-" + (sys.argv[1:] or [os.environ["RANK"]])[0], "w").write(json.dumps(found))
while not (sys.argv[1:] or os.path.exists("done")):
    time.sleep(0.1)
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nSTAGED_BY=archive exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as file:
        file.add(tmp_path / "env", ".")
    return tmp_path / "env.tar.gz"


def test_each_node_stages_the_archive_on_its_own_disk_and_ranks_and_shells_have_their_caches(
    user: User, archive: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(PROGRAM)
    user.folder = project
    disk = f"{tmp_path}/disk-$SLURMD_NODENAME"
    settings = [
        "cluster.nodes=2", "cluster.ranks_per_node=2", "cluster.partition=low", "cluster.time=10",
        f"cluster.stage.archive={archive}", f"cluster.stage.to={disk}", f"cluster.caches={disk}",
    ]  # fmt: skip
    run = user.submit("torchrun-script", "command=[python, train.py]", *settings)["run"]
    user.until(lambda: len(list(project.glob("note-*"))) == 4, 120, "the ranks")
    beside = user.run("shell", run, "--rank", "3", "--", "python", "train.py", "shell")
    assert beside.returncode == 0, beside.stderr
    (project / "done").touch()
    assert user.wait(run, 120) == 0
    in_shell = json.loads((project / "note-shell").read_text())
    notes = [json.loads((project / f"note-{rank}").read_text()) for rank in range(4)]
    assert {**in_shell, "cores": notes[3]["cores"]} == notes[3]  # a shell is not bound to the rank's cores
    for note in notes:
        own = Path(f"{tmp_path}/disk-{note['SLURMD_NODENAME']}")
        assert note["STAGED_BY"] == "archive"
        assert all(Path(note[name]).is_relative_to(own) for name in ("ORCH_STAGE", "TRITON_CACHE_DIR", "temp"))
        assert set(note["cores"]) <= os.sched_getaffinity(0)
    assert len({note["ORCH_STAGE"] for note in notes}) == 2
    assert len({note["TRITON_CACHE_DIR"] for note in notes}) == 4
    setup = user.ask("show", run)["setup"]
    assert setup["staged"] == notes[0]["ORCH_STAGE"]
    assert setup["variables"]["TMPDIR"] == notes[0]["temp"]
    assert set(setup["cores"]) == {"0", "1"}
