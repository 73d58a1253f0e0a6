"""Faults that would have no visible effect in a run of some configuration."""

from typing import Any

import pytest

from orchestrator.cli.drills.drill import why_undetectable
from orchestrator.cli.drills.scorecard import EXPECTED
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build

HUNG = {
    "stop-rank", "hang-in-collective", "hang-in-data", "hang-in-forward", "hang-in-save", "hold-lock", "hang-in-send",
    "skip-send",
}  # fmt: skip
IN_STAGES = {"pipeline": {"stages": 2}}


def refused(fields: dict[str, Any], *, instrumented: bool = False) -> dict[str, str]:
    config = build(JobConfig, fields)
    return {
        kind: why for kind in EXPECTED
        if (why := why_undetectable(kind, config, instrumented=instrumented)) is not None
    }  # fmt: skip


def test_only_a_model_in_stages_sends_between_them() -> None:
    assert refused({"parallel": IN_STAGES}) == {}
    found = refused({})
    assert set(found) == {"hang-in-send", "skip-send"}
    assert all("parallel.pipeline.stages=1" in why for why in found.values())


def test_undetectable_faults_of_a_command() -> None:
    found = refused({"command": ["python", "train.py"]})
    assert set(EXPECTED) - set(found) == {"kill-rank", "kill-agent", "kill-node", "full-disk"}
    assert "has not reported a step to orch: its ranks would wait until the time limit" in found["stop-rank"]
    assert "accepts no such request" in found["nan"]
    assert "saves and loads in its own way" in found["corrupt-checkpoint"]


def test_a_stopped_rank_of_an_instrumented_command_is_detected_and_restarted_unless_it_is_only_observed() -> None:
    fields: dict[str, Any] = {"command": ["python", "train.py"]}
    assert "stop-rank" not in refused(fields, instrumented=True)
    found = refused({**fields, "watch": {"action": "observe"}}, instrumented=True)
    assert found["stop-rank"].startswith("watch.action=observe: ")


@pytest.mark.parametrize(("off", "kinds", "key"), [
    ("hang", {*HUNG, "desync", "desync-order"}, "detection.hang.on=false"),
    ("straggler", {"slow-rank"}, "detection.straggler.on=false"),
])  # fmt: skip
def test_faults_that_need_a_detector_need_it_on(off: str, kinds: set[str], key: str) -> None:
    found = refused({"detection": {off: {"on": False}}, "parallel": IN_STAGES})
    assert set(found) == kinds
    assert all(key in why for why in found.values())
