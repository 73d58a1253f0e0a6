"""Calls of `orch` in a training loop of a program's own: without an agent, and its checkpoints on real ranks."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.public_api import loop_ranks
from tests.warm_programs import WarmPrograms
from trainer.protocol.rank_progress.program_record import ProgramFlags
from trainer.protocol.rank_progress.progress import StopReason

ROOT = Path(__file__).resolve().parents[2]
LOOP = "tests.public_api.loop_ranks"
INERT = """
import sys, orch
assert orch.resume_path() is None
orch.step(1, loss=0.5)
orch.step()
orch.saved("out/checkpoint-1")
print(orch.should_save(), orch.should_stop(), "torch" in sys.modules, "trainer" in sys.modules)
"""


@pytest.mark.parametrize("name", ["__init__.py", "program.py"])
def test_the_calls_have_the_syntax_of_python_3_9(name: str) -> None:
    ast.parse((ROOT / "orch" / name).read_text(), feature_version=(3, 9))


def pythons() -> list[str]:
    """Return this interpreter, and Python 3.9 if pyenv or the system has it."""
    found = [*Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9"), *Path("/usr/bin").glob("python3.9")]
    return [sys.executable, *map(str, found[:1])]


@pytest.mark.parametrize("python", pythons())
def test_without_an_agent_the_calls_do_nothing(tmp_path: Path, python: str) -> None:
    done = subprocess.run(
        [python, "-c", INERT], env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["False"] * 4, "")


@pytest.mark.multi
def test_requests_that_reach_the_ranks_at_different_calls_are_served_at_the_same_one(
    programs: WarmPrograms, tmp_path: Path
) -> None:
    save, stop = int(StopReason.SAVE_AND_GO_ON), int(StopReason.PREEMPTION)
    asked: list[list[tuple[int, int]]] = [[(3, save), (35, stop)], [(30, save)]]
    shared = {"world": 2, "store": str(tmp_path / "store")}
    rows = [[json.dumps({**shared, "rank": rank, "asked": each})] for rank, each in enumerate(asked)]
    first, second = programs.results("tests.public_api.asking_ranks", rows)
    assert first == second
    early, *_, last = first["saves"]
    assert 3 < early < 30
    assert 35 < last == first["stop"] == first["step"] == first["saved"]
    assert first["loss"] == 0.5
    assert first["flags"] & ProgramFlags.ANSWERS


@pytest.mark.multi
def test_a_killed_loop_ends_with_the_same_bits_as_an_undisturbed_one(programs: WarmPrograms, tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    calm = programs.results(LOOP, loop_ranks.ranks(tmp_path / "calm", 2, 1, kind="fsdp", steps=14, workers=1))
    killed = programs.run(LOOP, loop_ranks.ranks(tmp_path, 2, 1, kind="fsdp", steps=14, workers=1, dies=10))
    assert [one.code for one in killed] == [-9, -9], killed[0].err
    again = programs.results(LOOP, loop_ranks.ranks(tmp_path, 2, 2, kind="fsdp", steps=14, workers=1))
    assert [one["first"] for one in again] == [8, 8]
    assert [one["digest"] for one in again] == [one["digest"] for one in calm]
    assert [one["rows"] for one in again] == [one["rows"][8:] for one in calm]
    assert [one["seen"] for one in again] == [28, 28]


@pytest.mark.multi
def test_tensor_parallel_ranks_read_the_same_samples_and_auto_saves_by_itself(
    programs: WarmPrograms, tmp_path: Path
) -> None:
    first = programs.results(LOOP, loop_ranks.ranks(tmp_path, 2, 1, kind="tp", steps=30, every="auto"))
    assert first[0]["rows"] == first[1]["rows"]
    saved = first[0]["committed"]
    assert saved >= 10
    assert first[1]["committed"] == saved
    again = programs.results(LOOP, loop_ranks.ranks(tmp_path, 1, 2, kind="ddp", steps=saved))
    assert [one["first"] for one in again] == [saved]


@pytest.mark.multi
def test_checkpoints_fit_another_number_of_ranks_and_other_wrappers(programs: WarmPrograms, tmp_path: Path) -> None:
    first = programs.results(LOOP, loop_ranks.ranks(tmp_path, 3, 1, kind="ddp", steps=4))
    second = programs.results(LOOP, loop_ranks.ranks(tmp_path, 2, 2, kind="fsdp", steps=4))
    assert {one["first"] for one in first} == {0}
    assert {one["first"] for one in second} == {4}
    assert {one["digest"] for one in (*first, *second)} == {first[0]["digest"]}
    third = programs.results(LOOP, loop_ranks.ranks(tmp_path, 2, 3, kind="fsdp", steps=8))
    read = [row[at] for at in range(2) for rows in zip(*(one["rows"] for one in first), strict=True) for row in rows]
    assert len(read) == len(set(read)) == 24
    assert not set(read) & {index for one in third for row in one["rows"] for index in row}
