"""Settings of runs that train for seconds on the lab's nodes."""

from tests.end_to_end.user import TINY, User

SMALL = [
    "cluster.nodes=2", "cluster.ranks_per_node=2", "cluster.cpus_per_task=2", "cluster.partition=low",
    "cluster.time=10", "recovery.backoff=0.5", "train.steps=40", "checkpoint.every=8",
]  # fmt: skip
ONE_RANK_EACH = [*SMALL, *TINY, "cluster.ranks_per_node=1", "parallel.tp=1"]
SHORT = ["train.steps=16", "checkpoint.every=4"]


def training(user: User, run: str, beyond: int, seconds: float = 90) -> None:
    user.until(lambda: user.step(run) > beyond, seconds, f"training beyond step {beyond}")
