"""`orch resume` of a run whose folder was deleted: the folder is named, and nothing is asked for or made."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.states import RunState
from tests.orchestrator.cli.conftest import Seeds, Type


@pytest.mark.parametrize("state", [RunState.HELD, RunState.CANCELLED, RunState.RUNNING, RunState.RECOVERING])
@pytest.mark.parametrize("left", [None, "checkpoints/step-00000100.001-0123abcd"])
def test_a_deleted_folder_is_named_and_not_made_again(
    orch: Type, seeds: Seeds, service: SimpleNamespace, state: RunState, left: str | None
) -> None:
    """A rank that still saves makes parts of a deleted folder again: that is not the run's folder."""
    run = seeds.run(state=state)
    folder = Path(seeds.store.run(run).run_dir)
    shutil.rmtree(folder)
    if left is not None:
        (folder / left).mkdir(parents=True)
    before = sorted(seeds.root.rglob("*"))
    refused = orch("resume", run, "--no-controller")
    assert (refused.code, str(folder) in refused.err) == (4, True), refused.err
    assert seeds.store.user_requests() == []
    assert sorted(seeds.root.rglob("*")) == before
