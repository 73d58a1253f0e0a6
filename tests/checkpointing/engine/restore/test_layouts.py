"""Every layout restores from every other: equal bytes, equal fingerprints, and little more read than is needed."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpointing.format.manifest import FINGERPRINTS, parse_fingerprints
from tests.checkpointing.engine.restore.layout_program import BY_NODE, LAYOUTS
from tests.warm_programs import WarmPrograms

PROGRAM = "tests.checkpointing.engine.restore.layout_program"

pytestmark = pytest.mark.multi

Found = Callable[[str, str], list[dict[str, Any]]]
SAMPLE = ("1", "dp2xtp2", "dp4 by node")
"""The others are with the long counts; `dp4` restores as `dp4 by node` does."""
EACH = pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.proof) for name in LAYOUTS]
)
FEW = ("dp4", "dp4 by node")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def found(programs: WarmPrograms, folder: Path) -> Found:
    """What every rank of a layout has found in a mode; ranks that have begun do all that fast tests ask of them."""
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def run(size: int, jobs: Sequence[tuple[str, str]]) -> None:
        ranks = programs.results(PROGRAM, [(rank, size, folder, json.dumps(jobs)) for rank in range(size)])
        results.update(zip(jobs, map(list, zip(*ranks, strict=True)), strict=True))

    def get(mode: str, layout: str) -> list[dict[str, Any]]:
        if (mode, layout) not in results:
            run(LAYOUTS[layout], [(mode, layout)])
        return results[mode, layout]

    for size in (1, 2, 4):
        saves = [("save", layout) for layout in LAYOUTS if LAYOUTS[layout] == size]
        run(size, [*saves, *([*(("few", layout) for layout in FEW), *restores(4)] if size == 4 else [])])
    run(1, restores(1))
    return get


def restores(size: int) -> list[tuple[str, str]]:
    return [(mode, layout) for mode in ("load", "memory") for layout in SAMPLE if LAYOUTS[layout] == size]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_rank_knows_the_committed_step(found: Found, layout: str) -> None:
    assert [rank["committed"] for rank in found("save", layout)] == [7] * LAYOUTS[layout]


@EACH
def test_every_layout_restores_from_every_other(found: Found, layout: str) -> None:
    for rank, result in enumerate(found("load", layout)):
        assert result["found"].keys() == LAYOUTS.keys()
        for saved, seen in result["found"].items():
            case = f"rank {rank} of {layout} from {saved}"
            assert (seen["step"], seen["layout"]) == (7, saved), case
            assert seen["differing"] == [], case
            assert seen["fingerprints"] == [], case
            # Two replicas read what both of them need twice: that is no slower than to send it.
            limit = 2.05 if layout == "hsdp" else 1.1
            if saved.endswith(BY_NODE):  # what lies between two ranks' parts is read too
                limit *= 3
            assert seen["read"] <= limit * seen["needed"], case


def test_the_ranks_of_a_node_write_one_file(found: Found, folder: Path) -> None:
    def shards(layout: str) -> list[str]:
        return sorted(path.name for path in (folder / f"saved-{layout}").glob("step-*/*.distcp"))

    assert shards("dp4") == [f"__{rank}_0.distcp" for rank in range(4)]
    assert shards("dp4 by node") == ["__node0.distcp", "__node1.distcp"]


@pytest.mark.parametrize("layout", FEW)
def test_ranks_that_have_nothing_to_write_do_not_fail_the_save(found: Found, folder: Path, layout: str) -> None:
    assert found("few", layout) == [{"failure": None, "step": 7, "value": 7.0}] * 4
    (file,) = (folder / f"few-{layout}").glob("step-*/*.distcp")
    assert file.name == ("__node0.distcp" if layout.endswith(BY_NODE) else "__0_0.distcp")


def test_a_damaged_byte_in_a_nodes_file_is_found_by_any_reader(found: Found, folder: Path) -> None:
    shutil.copytree(folder / "saved-dp4 by node", folder / "damaged")
    victim = next((folder / "damaged").glob("step-*/__node1.distcp"))
    with victim.open("r+b") as file:
        file.seek(9 << 20)  # the second rank's part
        byte = file.read(1)
        file.seek(9 << 20)
        file.write(bytes([byte[0] ^ 1]))
    for layout in ("dp4 by node", "1"):
        for rank in found("damaged", layout):
            assert re.search(r"__node1\.distcp chunk 1: digest differs", rank["refused"])


def test_fingerprints_do_not_depend_on_the_layout(found: Found, folder: Path) -> None:
    files = [folder.glob(f"saved-{layout}/step-*/{FINGERPRINTS}") for layout in LAYOUTS]
    words = [parse_fingerprints(next(file).read_bytes()) for file in files]
    assert len(words[0]) == 15
    assert all(each == words[0] for each in words)


@EACH
def test_ranks_that_have_prepared_restore_their_own_layout_from_disk_and_from_memory(found: Found, layout: str) -> None:
    """Some ranks have nothing of the shortest tensors, and no frame of them in their files either."""
    for rank, result in enumerate(found("memory", layout)):
        case = f"rank {rank} of {layout}"
        assert result["refused"] == [], case
        assert result["found"] == [[7, False, []], [8, True, []]], case
