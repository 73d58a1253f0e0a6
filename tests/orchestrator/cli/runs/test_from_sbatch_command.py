"""`orch submit --from-sbatch`: it shows, writes and asks before it submits."""

from pathlib import Path

import pytest

from orchestrator.cli.runs import from_sbatch
from tests.orchestrator.cli.conftest import Patch, Type

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --time=60
trap 'echo late' USR1
source ./env.sh
srun torchrun --nproc_per_node=2 train.py --epochs 3
"""


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "job.sh").write_text(SCRIPT)
    return tmp_path


def test_a_script_given_as_configuration_gets_the_right_hint(orch: Type, here: Path) -> None:
    said = orch("submit", "job.sh")
    assert (said.code, "orch submit --from-sbatch job.sh" in said.err) == (2, True)
    (here / "job.sh").write_text("#!/bin/bash\npython train.py\n")
    assert "'command=[bash, job.sh]'" in orch("submit", "job.sh").err


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"home", "config", "runs"}


def test_print_config_writes_nothing(orch: Type, here: Path) -> None:
    before = names(here)
    said = orch("submit", "--from-sbatch", "job.sh", "--print-config")
    assert (said.code, names(here)) == (0, before)
    assert "ranks_per_node: 2" in said.out
    assert "line 4 is not in the configuration: trap 'echo late' USR1" in said.err
    data = orch("submit", "--from-sbatch", "job.sh", "--print-config", "--json").data
    assert data["config"] == said.out
    assert [item["line"] for item in data["not_understood"]] == [4]
    assert "source ./env.sh" in data["setup"]


def test_nothing_is_submitted_without_a_confirmation(orch: Type, here: Path, monkeypatch: Patch) -> None:
    said = orch("submit", "--from-sbatch", "job.sh", "train.steps=3")
    assert (said.code, "cannot be confirmed" in said.err) == (2, True)
    assert "orch submit ./job.yaml train.steps=3   or the same command with -y" in said.err
    assert {"job.yaml", "job.setup.sh"} <= names(here)
    monkeypatch.setattr(from_sbatch.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(from_sbatch.click, "confirm", lambda *_, **__: False)
    said = orch("submit", "--from-sbatch", "job.sh", "name=mine")
    assert (said.code, "nothing was submitted; to submit it later: orch submit ./job.yaml name=mine" in said.err) == (
        0,
        True,
    )
    assert orch("status", "--json").data == []


def test_an_edited_configuration_is_not_overwritten(orch: Type, here: Path) -> None:
    (here / "job.yaml").write_text("name: mine\n")
    said = orch("submit", "--from-sbatch", "job.sh", "-y")
    assert (said.code, "job.yaml exists and differs" in said.err) == (2, True)
    assert "orch submit ./job.yaml" in said.err
    assert (here / "job.yaml").read_text() == "name: mine\n"
    assert "job.setup.sh" not in names(here)


def test_keys_that_the_script_leaves_open_must_be_given(orch: Type, here: Path) -> None:
    (here / "job.sh").write_text("#!/bin/bash\n#SBATCH -n 4\n#SBATCH -t 60\nsrun python train.py\n")
    said = orch("submit", "--from-sbatch", "job.sh", "-y")
    assert (said.code, "the script leaves open: cluster.nodes" in said.err) == (2, True)
    said = orch("submit", "--from-sbatch", "job.sh", "-y", "cluster.nodes=2", "--dry-run", "--cluster", "local")
    assert said.code == 0, said.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("tiny-gpt", "--from-sbatch", "job.sh"), "leave out tiny-gpt"),
        (("--from", "a-1@3", "--from-sbatch", "job.sh"), "leave out --from a-1@3"),
        (("tiny-gpt", "-y"), "-y is only for --from-sbatch"),
        (("tiny-gpt", "--print-config"), "--print-config is only for --from-sbatch"),
    ],
)
def test_other_sources_are_refused(orch: Type, words: tuple[str, ...], why: str) -> None:
    said = orch("submit", *words)
    assert (said.code, why in said.err) == (2, True), said.err


def test_a_script_with_the_name_of_its_configuration_is_not_replaced(orch: Type, here: Path) -> None:
    (here / "job.yaml").write_text(SCRIPT)
    said = orch("submit", "--from-sbatch", "job.yaml", "-y")
    assert (said.code, "would replace the script" in said.err) == (2, True)
    assert "remove it" not in said.err
    assert (here / "job.yaml").read_text() == SCRIPT
