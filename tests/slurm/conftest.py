"""The lab for tests marked `slurm`: one for the whole session."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.user import User, warm_environment
from tests.slurm.lab import LabError, SlurmLab, install
from tests.slurm.settings import RENAMING
from tests.trainer.agent.warm_agents import WarmAgents


@pytest.fixture(scope="session")
def lab() -> Iterator[SlurmLab]:
    """A running Slurm of four nodes; skipped with the reason where it cannot be had, except under CI=true."""
    folder = Path(tempfile.mkdtemp(prefix="orch-slurm-"))  # pytest's own folders are closed to other users
    folder.chmod(0o755)
    try:
        install()
        (folder / "job_submit.lua").write_text(RENAMING)
        prolog = folder / "prolog"
        prolog.write_text(f"#!/bin/sh\n[ ! -e {folder}/sick-$SLURMD_NODENAME ]\n")  # a site's check of the node
        prolog.chmod(0o755)
        slurm = SlurmLab(folder, extra=f"JobSubmitPlugins=lua\nProlog={prolog}\n").start()
    except LabError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield slurm
    slurm.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def user(lab: SlurmLab, agents: WarmAgents, tmp_path: Path) -> Iterator[User]:
    someone = User(tmp_path, "slurm", lab.environment() | warm_environment(agents))
    yield someone
    someone.leave()
    lab.ask("scancel", "--me")
    someone.until(lambda: not lab.ask("squeue", "-h", "--me").stdout.strip(), 60, "an empty queue")
