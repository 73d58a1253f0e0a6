"""Local jobs that are ended with their test."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tokenization import shard_writer
from tests.trainer.agent.job import LocalJob, until
from tests.trainer.agent.warm_agents import WarmAgents

STAND_IN = Path(__file__).parent / "stand_in.py"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a part of the standard library."""
    out = tmp_path_factory.mktemp("data") / "tokens"
    shard_writer.prepare([Path(json.__file__).parent], out)
    return out


@pytest.fixture
def jobs() -> Iterator[list[LocalJob]]:
    """Local jobs of this test, ended with it."""
    made: list[LocalJob] = []
    yield made
    for one in made:
        one.close()
        until(lambda one=one: not one.processes(), 30, lambda one=one: f"left behind: {one.processes()}")


@pytest.fixture
def job(tmp_path: Path, jobs: list[LocalJob], agents: WarmAgents) -> Callable[..., LocalJob]:
    """Makes a local job whose ranks are stand-in scripts with the given orders."""

    def make(*orders: str, folder: str = "", **config: Any) -> LocalJob:
        command = [sys.executable, "-S", str(STAND_IN), *orders]
        jobs.append(LocalJob(tmp_path / folder, **{"command": command, "starter": agents, **config}))
        return jobs[-1]

    return make


@pytest.fixture
def warm_job(job: Callable[..., LocalJob], agents: WarmAgents) -> Callable[..., LocalJob]:
    """Makes a local job of the built-in model, or of another workload, whose agents need not import anything."""

    def make(**config: Any) -> LocalJob:
        return job(command=[], starter=agents, **config)

    return make
