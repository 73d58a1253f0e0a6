"""How many nodes in service could hold a job, by what sinfo prints."""

from typing import Any

import pytest

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm import node_capacity
from orchestrator.scheduler.slurm.node_capacity import count_usable

SINFO = """\
n1|low*|8|4000|(null)|idle
n1|high|8|4000|(null)|idle
n2|low*|8|4000|(null)|allocated
n3|low*|8|4000|(null)|mixed
n4|low*|4|4000|(null)|idle
n5|low*|8|4000|(null)|down*
n6|low*|8|4000|(null)|drained
n7|low*|8|4000|(null)|idle*
n8|low*|8|4000|(null)|idle~
n9|low*|8|4000|(null)|maint
n10|low*|8|4000|(null)|idle$
n11|low*|8|4000|(null)|unheard-of
"""


@pytest.mark.parametrize(
    ("asked", "without", "count"),
    [
        ({}, (), 5),  # n1 to n4, and n8, which is only asleep
        ({"cpus_per_task": 8}, (), 4),
        ({"cpus_per_task": 8}, ("n2", "n5"), 3),
        ({"exclude": ("n[1-2]",)}, (), 3),
        ({"exclude": ("n[1-2]",), "avoided": ("n1", "n2")}, ("n1",), 4),  # what orch avoids it may take again
        ({"partition": "high"}, (), 1),
        ({"partition": "low,high"}, (), 5),
        ({"partition": "nowhere"}, (), None),
        ({"cpus_per_task": 99}, (), 0),
    ],
)
def test_nodes_in_service_that_have_what_is_asked(
    asked: dict[str, Any], without: tuple[str, ...], count: int | None
) -> None:  # fmt: skip
    assert count_usable(Resources(nodes=4, **asked), without, SINFO) == count


def test_a_slurm_that_does_not_answer_is_no_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_capacity, "run_command", lambda command, timeout: Failed())
    with pytest.raises(SlurmUnreachable, match="sinfo failed: slurm_load_partitions: Unable to contact"):
        node_capacity.usable_nodes(Resources(nodes=1), frozenset())


class Failed:
    returncode, stdout, stderr = 1, "", "slurm_load_partitions: Unable to contact slurm controller"
