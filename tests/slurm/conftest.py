"""The lab for tests marked `slurm`: one for the whole session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.user import User, warm_environment
from tests.slurm.lab import SlurmLab, temporary_lab
from tests.slurm.settings import RENAMING
from tests.trainer.agent.warm_agents import WarmAgents


def _renaming_site(lab: SlurmLab) -> None:
    (lab.folder / "job_submit.lua").write_text(RENAMING)
    prolog = lab.folder / "prolog"
    prolog.write_text(f"#!/bin/sh\n[ ! -e {lab.folder}/sick-$SLURMD_NODENAME ]\n")  # a site's check of the node
    prolog.chmod(0o755)


@pytest.fixture(scope="session")
def lab() -> Iterator[SlurmLab]:
    with temporary_lab(_renaming_site, extra="JobSubmitPlugins=lua\nProlog={folder}/prolog\n") as made:
        yield made


@pytest.fixture
def user(lab: SlurmLab, agents: WarmAgents, tmp_path: Path) -> Iterator[User]:
    someone = User(tmp_path, "slurm", lab.environment() | warm_environment(agents))
    yield someone
    someone.leave()
    lab.ask("scancel", "--me")
    someone.until(lambda: not lab.ask("squeue", "-h", "--me").stdout.strip(), 60, "an empty queue")
