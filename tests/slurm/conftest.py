"""The lab for tests marked `slurm`: one for the whole session, or one for each suite that ORCH_TEST_SLURM names."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler
from tests.end_to_end.user import User, warm_environment
from tests.orchestrator.scheduler.contract import World, eventually
from tests.slurm.lab import SlurmLab, temporary_lab
from tests.slurm.settings import RENAMING
from tests.slurm.small_runs import ONE_RANK_EACH, SHORT
from tests.slurm.suites import CASES_ON, MACHINE, chosen_suites
from tests.trainer.agent.warm_agents import WarmAgents


def _renaming_site(lab: SlurmLab) -> None:
    (lab.folder / "job_submit.lua").write_text(RENAMING)
    prolog = lab.folder / "prolog"
    prolog.write_text(f"#!/bin/sh\n[ ! -e {lab.folder}/sick-$SLURMD_NODENAME ]\n")  # a site's check of the node
    prolog.chmod(0o755)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat each test on every chosen suite."""
    if "suite" in metafunc.fixturenames and chosen_suites():
        metafunc.parametrize("suite", chosen_suites(), scope="session")


@pytest.fixture(scope="session")
def suite() -> str:
    """Suite of the test's lab."""
    return MACHINE


@pytest.fixture(autouse=True)
def count_cases(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Record the suite of each case, for docs/slurm-versions.md."""
    if "suite" in request.fixturenames:
        record_property(CASES_ON.format(suite=request.getfixturevalue("suite")), 1)


@pytest.fixture(scope="session")
def lab(suite: str) -> Iterator[SlurmLab]:
    with temporary_lab(suite, _renaming_site, extra="JobSubmitPlugins=lua\nProlog={folder}/prolog\n") as made:
        yield made


@pytest.fixture(scope="session")
def calm(agents: WarmAgents, tmp_path_factory: pytest.TempPathFactory) -> tuple[User, str]:
    """An undisturbed run of ONE_RANK_EACH and SHORT, for comparison, and its user."""
    someone = User(tmp_path_factory.mktemp("calm"), "local", warm_environment(agents))
    run = someone.submit("tiny-gpt", *ONE_RANK_EACH, *SHORT, "cluster.nodes=1", "cluster.ranks_per_node=2")["run"]
    assert someone.wait(run) == 0
    someone.run("controller", "stop")
    return someone, run


@pytest.fixture
def world(lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for key, value in lab.environment().items():
        monkeypatch.setenv(key, value)
    tmp_path.chmod(0o755)
    yield World(scheduler=SlurmScheduler(entry="tests.slurm.payload:record"), folder=tmp_path)
    lab.ask("scancel", "--me")
    eventually(lambda: not lab.ask("squeue", "-h", "--me").stdout.strip(), "the queue is empty", 60)


@pytest.fixture
def user(lab: SlurmLab, agents: WarmAgents, tmp_path: Path) -> Iterator[User]:
    someone = User(tmp_path, "slurm", lab.environment() | warm_environment(agents))
    yield someone
    someone.leave()
    lab.ask("scancel", "--me")
    someone.until(lambda: not lab.ask("squeue", "-h", "--me").stdout.strip(), 60, "an empty queue")
