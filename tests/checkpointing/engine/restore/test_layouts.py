"""Every layout restores from every other: equal bytes, equal fingerprints, and little more read than is needed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpointing.format.index import FINGERPRINTS, parse_fingerprints
from tests.checkpointing.engine.restore.layout_program import LAYOUTS

PROGRAM = Path(__file__).with_name("layout_program.py")
ROOT = Path(__file__).resolve().parents[4]

pytestmark = pytest.mark.multi


def run(mode: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every layout has found."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), mode, str(folder)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return {
        layout: [json.loads((folder / f"{mode}-{layout}-{rank}.json").read_text()) for rank in range(size)]
        for layout, size in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for layout, ranks in run("save", folder).items():
        assert [rank["committed"] for rank in ranks] == [7] * len(ranks), (layout, ranks)
    return folder


def test_every_layout_restores_from_every_other(folder: Path) -> None:
    for layout, ranks in run("load", folder).items():
        for rank, result in enumerate(ranks):
            for saved, found in result["found"].items():
                case = f"rank {rank} of {layout} from {saved}"
                assert (found["step"], found["layout"]) == (7, saved), case
                assert found["differing"] == [], case
                assert found["fingerprints"] == [], case
                # Two replicas read what both of them need twice: that is no slower than to send it.
                limit = 2.05 if layout == "hsdp" else 1.1
                assert found["read"] <= limit * found["needed"], case


def test_fingerprints_do_not_depend_on_the_layout(folder: Path) -> None:
    files = [folder.glob(f"saved-{layout}/step-*/{FINGERPRINTS}") for layout in LAYOUTS]
    words = [parse_fingerprints(next(file).read_bytes()) for file in files]
    assert len(words[0]) == 15
    assert all(each == words[0] for each in words)


def test_ranks_that_have_prepared_restore_their_own_layout_from_disk_and_from_memory(
    folder: Path, tmp_path: Path
) -> None:
    """Some ranks have nothing of the shortest tensors, and no frame of them in their files either."""
    shutil.copytree(folder, tmp_path / "own", ignore=shutil.ignore_patterns("meeting-*"))
    for layout, ranks in run("memory", tmp_path / "own").items():
        for rank, result in enumerate(ranks):
            case = f"rank {rank} of {layout}"
            assert result["refused"] == [], case
            assert result["found"] == [[7, False, []], [8, True, []]], case
