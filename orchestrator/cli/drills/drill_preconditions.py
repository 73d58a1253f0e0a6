"""PURE: what a fault would come to in a run of this configuration: nothing that anybody notices, or too much."""

from orchestrator.cli.drills.scorecard import EXPECTED, NODE_KINDS
from trainer.contract.config import JobConfig
from trainer.contract.config_sections.drill_config import BETWEEN_STAGES
from trainer.contract.events import EventKind

_COSTLY = {
    "desync": "the run will be held", "desync-order": "the run will be held",
    "nan": "a batch is skipped for good", "spike": "a batch may be skipped for good",
    "full-disk": "its saves fail until a new job starts", "slow-rank": "its rank stays slow until the next restart",
    "corrupt-checkpoint": "its newest checkpoint is damaged for good",
}  # fmt: skip
"""What a fault costs any run beyond the time of a restart."""
_FROM_OUTSIDE = ("kill-rank", "kill-agent", "kill-node", "full-disk")
"""Faults that need nothing of a rank, and whose end everybody sees."""


def why_undetectable(kind: str, config: JobConfig) -> str | None:
    """Why a drill of this kind would come to nothing; None where it is noticed."""
    command, detection = config.command, config.detection
    # A program of the user's own has no progress cell: it takes no orders, and nobody knows its steps.
    if command and kind == "stop-rank":
        return (
            "its ranks run a command of their own, which is not watched for hangs: they would wait until the time limit"
        )
    if command and kind == "corrupt-checkpoint":
        return "its ranks are a command of its own, which saves and loads in its own way"
    if command and kind not in _FROM_OUTSIDE:
        return "its ranks are a command of its own, which takes no such order"
    if kind in BETWEEN_STAGES and config.parallel.pipeline.ranks == 1:
        return "its model is in one piece (parallel.pipeline.stages=1): no stage sends anything"
    # What stands still is found by the watch alone.
    if EventKind.INCIDENT in EXPECTED[kind].signs and not detection.hang.on:
        return "hang detection is off (detection.hang.on=false): its ranks would wait until the time limit"
    # So is what is slow, by the comparison of ranks.
    if EventKind.STRAGGLER in EXPECTED[kind].signs and not detection.straggler.on:
        return "straggler detection is off (detection.straggler.on=false): the rank would stay slow"
    return None


def extra_cost(kind: str, config: JobConfig, at: int | None) -> str | None:
    """What the fault costs this run beyond a restart; None when nothing. `at`: the rank or node, None: the default."""
    if kind not in NODE_KINDS:
        return _COSTLY.get(kind)
    cluster = config.cluster
    # The coordinator lives on the first node: no spare can take its place.
    first = at == 0 or cluster.nodes == 1
    if cluster.spare_nodes and not first:
        return None
    why = "the coordinator is on its first node" if cluster.spare_nodes else "it has no spare node"
    return f"{why}, so a new job has to be submitted, which may wait in the queue"
