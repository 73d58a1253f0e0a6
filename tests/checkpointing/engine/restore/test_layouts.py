"""Every layout restores from every other: equal bytes, equal fingerprints, and little more read than is needed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing.format.manifest import FINGERPRINTS, parse_fingerprints
from tests.checkpointing.engine.restore.layout_program import BY_NODE, LAYOUTS
from tests.warm_programs import WarmPrograms

PROGRAM = "tests.checkpointing.engine.restore.layout_program"

pytestmark = pytest.mark.multi

Run = Callable[[str, str, Path], list[dict[str, Any]]]
SAMPLE = ("dp2xtp2", "dp4 by node")
"""The others are with the long counts; `dp4` restores as `dp4 by node` does."""
EACH = pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.proof) for name in LAYOUTS]
)


@pytest.fixture(scope="module")
def run(programs: WarmPrograms) -> Run:
    """What every rank of a layout has found."""

    def of(mode: str, layout: str, folder: Path) -> list[dict[str, Any]]:
        return programs.results(PROGRAM, [(mode, layout, rank, folder) for rank in range(LAYOUTS[layout])])

    return of


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved in every layout."""
    folder = tmp_path_factory.mktemp("layouts")
    for layout in LAYOUTS:
        ranks = run("save", layout, folder)
        assert [rank["committed"] for rank in ranks] == [7] * len(ranks), (layout, ranks)
    return folder


@EACH
def test_every_layout_restores_from_every_other(run: Run, folder: Path, layout: str) -> None:
    for rank, result in enumerate(run("load", layout, folder)):
        assert result["found"].keys() == LAYOUTS.keys()
        for saved, found in result["found"].items():
            case = f"rank {rank} of {layout} from {saved}"
            assert (found["step"], found["layout"]) == (7, saved), case
            assert found["differing"] == [], case
            assert found["fingerprints"] == [], case
            # Two replicas read what both of them need twice: that is no slower than to send it.
            limit = 2.05 if layout == "hsdp" else 1.1
            if saved.endswith(BY_NODE):  # what lies between two ranks' parts is read too
                limit *= 3
            assert found["read"] <= limit * found["needed"], case


def test_the_ranks_of_a_node_write_one_file(folder: Path) -> None:
    def shards(layout: str) -> list[str]:
        return sorted(path.name for path in (folder / f"saved-{layout}").glob("step-*/*.distcp"))

    assert shards("dp4") == [f"__{rank}_0.distcp" for rank in range(4)]
    assert shards("dp4 by node") == ["__node0.distcp", "__node1.distcp"]


@pytest.mark.parametrize("layout", ["dp4", "dp4 by node"])
def test_ranks_that_have_nothing_to_write_do_not_fail_the_save(run: Run, tmp_path: Path, layout: str) -> None:
    assert run("few", layout, tmp_path) == [{"failure": None, "step": 7, "value": 7.0}] * 4
    (file,) = (tmp_path / f"few-{layout}").glob("step-*/*.distcp")
    assert file.name == ("__node0.distcp" if layout.endswith(BY_NODE) else "__0_0.distcp")


def test_a_damaged_byte_in_a_nodes_file_is_found_by_whoever_reads_it(run: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "saved-dp4 by node", tmp_path / "saved-dp4 by node")
    victim = next((tmp_path / "saved-dp4 by node").glob("step-*/__node1.distcp"))
    with victim.open("r+b") as file:
        file.seek(9 << 20)  # the second rank's part
        byte = file.read(1)
        file.seek(9 << 20)
        file.write(bytes([byte[0] ^ 1]))
    for layout in ("dp4 by node", "1"):
        with pytest.raises(AssertionError, match=r"NothingIntact: .*__node1\.distcp chunk 1: digest differs"):
            run("damaged", layout, tmp_path)


def test_fingerprints_do_not_depend_on_the_layout(folder: Path) -> None:
    files = [folder.glob(f"saved-{layout}/step-*/{FINGERPRINTS}") for layout in LAYOUTS]
    words = [parse_fingerprints(next(file).read_bytes()) for file in files]
    assert len(words[0]) == 15
    assert all(each == words[0] for each in words)


@EACH
def test_ranks_that_have_prepared_restore_their_own_layout_from_disk_and_from_memory(
    run: Run, folder: Path, tmp_path: Path, layout: str
) -> None:
    """Some ranks have nothing of the shortest tensors, and no frame of them in their files either."""
    shutil.copytree(folder / f"saved-{layout}", tmp_path / f"saved-{layout}")
    for rank, result in enumerate(run("memory", layout, tmp_path)):
        case = f"rank {rank} of {layout}"
        assert result["refused"] == [], case
        assert result["found"] == [[7, False, []], [8, True, []]], case
