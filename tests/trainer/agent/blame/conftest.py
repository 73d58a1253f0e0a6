"""Jobs of a tiny model whose hangs are declared soon."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.blame.incidents import PER_NODE
from tests.trainer.agent.job import LocalJob
from tests.trainer.agent.test_torch_ranks import TINY

QUICK = {"hang": {"least": 3.0, "slow": 20.0}, "preflight": {"on": False}}
"""As in production, but sooner: the limits of a tiny model need not be those of a large one."""


@pytest.fixture
def make(warm_job: Callable[..., LocalJob], data: Path) -> Callable[..., LocalJob]:
    numbers = iter(range(1000))

    def start(**over: Any) -> LocalJob:
        train = {**TINY["train"], "steps": 60, **over.pop("train", {})}
        nodes = over.pop("nodes", 2)
        shape = {"nodes": nodes, "ranks": PER_NODE, "folder": f"job-{next(numbers)}"}
        settings = {**TINY, "detection": QUICK, "data": {"path": str(data)}, **over}
        return warm_job(**shape, **{**settings, "train": train})

    return start
