"""What becomes of the ranks' first measurements."""

from typing import Any

import pytest

from trainer.agent.trial import Trial
from trainer.contract.outcome import FailureKind
from trainer.contract.watching import PreflightConfig

NODES = ["n0", "n1", "n2", "n3"]
MACHINES = {node: f"boot-{node}" for node in NODES}


def told(rank: int, matmul: float = 1e9) -> dict[str, Any]:
    return {"rank": rank, "matmul": matmul, "memory": 1e10, "pairs": []}


def measured(machines: dict[str, str], slow: int | None = None) -> Trial:
    trial = Trial(NODES, machines, PreflightConfig())
    complete = [trial.heard(told(rank, 2e8 if rank == slow else 1e9)) for rank in range(4)]
    assert complete == [False, False, False, True]
    return trial


def test_a_slow_node_is_suspect_when_all_have_measured() -> None:
    failure = measured(MACHINES, slow=2).failure()
    assert failure is not None
    assert (failure.kind, failure.node) == (FailureKind.NODE_SUSPECT, "n2")


def test_nodes_that_are_fit_pass_and_their_median_is_told() -> None:
    trial = measured(MACHINES)
    assert trial.failure() is None
    assert trial.told() == {"matmul": 1e9, "memory": 1e10}


@pytest.mark.parametrize("machines", [{}, {node: "one" for node in NODES}, {**MACHINES, "n3": "boot-n0"}])
def test_nodes_that_may_share_a_machine_are_not_held_against_each_other(machines) -> None:
    assert measured(machines, slow=2).failure() is None


def test_a_rank_counts_once_and_only_if_there_is_one() -> None:
    trial = Trial(NODES[:2], MACHINES, PreflightConfig())
    assert [trial.heard(told(0)), trial.heard(told(0)), trial.heard(told(1)), trial.heard(told(1))] == [
        False, False, True, False,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="there is no rank 2"):
        trial.heard(told(2))
