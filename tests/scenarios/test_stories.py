"""Stories of single runs: what happened, and what the registry says about it afterwards."""

from pathlib import Path

from orchestrator.states import RunState
from tests.scenarios.world import World


def test_a_quiet_run_goes_from_intent_to_succeeded(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.finish().state is RunState.SUCCEEDED
    assert [transition.after for transition in world.store.transitions(world.name) if transition.kind == "run"] == [
        "QUEUED",
        "RUNNING",
        "SUCCEEDED",
    ]
    assert world.run.step == 40
