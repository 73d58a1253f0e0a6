"""SIGSTOP of the controller, of the coordinator, of another agent: the run ends as if nothing had been, nobody is blamed."""


import pytest

pytestmark = [pytest.mark.multi, pytest.mark.timeout(900)]
RUN = [
    "train.steps=40", "checkpoint.every=8", "recovery.backoff=0.2", "cluster.nodes=2", "cluster.ranks_per_node=1",
    "parallel.data=2", "train.batch_size=8",
]  # fmt: skip
SLOWLY = "drill.events=[{kind: slow-rank, rank: 1, step: 12, value: 0.4}]"
HASTY = "recovery.hang.agent=4"
