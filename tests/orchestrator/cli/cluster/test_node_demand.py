"""`orch doctor`: do the nodes that Slurm reports have what a configuration asks for?"""

from typing import Any

import pytest

from orchestrator.cli.cluster import doctor
from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.interface import Resources

SINFO = {
    "%P": "low*\nhigh\n",
    "%N|%P|%c|%m|%G|%T": "n1|low*|8|4000|(null)|idle\nn2|low*|8|4000|(null)|idle\nn1|high|8|4000|(null)|idle\n",
}


@pytest.mark.parametrize(
    ("asked", "wanted", "level", "text", "hint"),
    [
        ({"mem": "3G"}, False, "ok", "partition low has what first requests: 2 nodes with 1 core, 3G", ""),
        (
            {"mem": "8G"}, False, "warn", "first requests more than nodes have: cluster.mem=8G on 2 nodes: partition "
            "low has no node with that much", "`orch submit first cluster.mem=4000M`, or write that into",
        ),
        ({"mem": "8G"}, True, "fail", "first requests more than nodes have", "cluster.mem=4000M"),
        (
            {"partition": "nope"}, True, "fail", "first names partition nope, which does not exist; available: low, "
            "high", "`orch submit first cluster.partition=low`, or write that into",
        ),
    ],
)  # fmt: skip
def test_doctor_compares_what_a_run_asks_for_with_the_nodes(
    asked: dict[str, Any], wanted: bool, level: str, text: str, hint: str
) -> None:
    found = doctor.demand("first", Resources(nodes=2, **asked), lambda words: SINFO[words[-1]], wanted=wanted)
    assert (found.name, found.level) == ("nodes", level)
    assert found.text.startswith(text)
    assert hint in found.hint


def test_doctor_takes_no_answer_for_no_fault() -> None:
    def silent(command: list[str]) -> str:
        raise SlurmUnreachable("sinfo got no answer")

    found = doctor.demand("first", Resources(nodes=2), silent, wanted=True)
    assert (found.level, found.text) == (
        "warn",
        "cannot check whether nodes have what first requests: sinfo got no answer",
    )
