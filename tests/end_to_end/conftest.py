"""Fixtures of local users, whose processes end with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.user import CALM, User, warm_environment
from tests.trainer.agent.warm_agents import WarmAgents


@pytest.fixture
def user(tmp_path: Path, agents: WarmAgents) -> Iterator[User]:
    someone = User(tmp_path, "local", warm_environment(agents))
    yield someone
    someone.leave()


@pytest.fixture
def cold_user(tmp_path: Path) -> Iterator[User]:
    someone = User(tmp_path, "local")
    yield someone
    someone.leave()


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory, agents: WarmAgents) -> Iterator[tuple[User, str]]:
    someone = User(tmp_path_factory.mktemp("calm"), "local", warm_environment(agents))
    one_node = ("cluster.nodes=1", "cluster.ranks_per_node=2")
    run = someone.submit("tiny-gpt", *CALM, *one_node, "checkpoint.keep=9")["run"]
    assert someone.wait(run) == 0
    someone.run("controller", "stop")  # most tests only read its files
    yield someone, run
    someone.leave()
