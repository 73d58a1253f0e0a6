"""A torchrun script in an image without orch, on simulated nodes."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests import image
from tests.end_to_end.user import User, assert_gone

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.multi,
    pytest.mark.proof,  # `tests/slurm/test_containers.py` runs every time
    pytest.mark.skipif(not image.is_possible(), reason="mount namespaces need root"),
]
SHAPE = ["cluster.nodes=1", "cluster.ranks_per_node=2", "recovery.backoff=0.2"]


def facts(folder: Path, rank: int) -> dict[str, object]:
    return dict(json.loads((folder / f"rank-{rank}.json").read_text()))


def step(folder: Path) -> int:
    path = folder / "step"
    return int(path.read_text() or 0) if path.exists() else 0


def test_a_script_in_an_image_without_orch_gets_full_care(cold_user: User, tmp_path: Path) -> None:
    root, folder = tmp_path / "image", tmp_path / "work"
    folder.mkdir()
    image.make_image(root)
    run = cold_user.submit("torchrun-script", *SHAPE, *image.settings(root, folder))["run"]
    cold_user.until(lambda: step(folder) > 3, 180, "steps")
    first = facts(folder, 1)
    assert (first["image"], first["python"], first["found"]) == (True, image.PYTHON, [])

    os.kill(int(str(first["pid"])), signal.SIGKILL)
    cold_user.until(lambda: facts(folder, 1)["pid"] != first["pid"], 180, "a restart")
    second = facts(folder, 1)
    assert int(str(second["first"])) > 0  # it continues from its own file
    cold_user.until(lambda: step(folder) > int(str(second["first"])), 180, "further steps")
    cold_user.until(lambda: (cold_user.status(run)["step"] or 0) > int(str(second["first"])), 180, "the step shown")
    assert [attempt["generations"] for attempt in cold_user.show(run)["attempts"]] == [2]
    assert "step " in cold_user.run("logs", run).stdout

    pids = {process.pid: process for process in cold_user.processes("")}
    for process in cold_user.processes("orch-controller"):
        pids.pop(process.pid, None)
    assert {int(str(second["pid"])), int(str(second["child"]))} <= set(pids)
    cold_user.ask("cancel", run)
    assert_gone(list(pids.values()))
    assert (folder / "rank-1.term").exists()
