"""Hugging Face's Trainer as a `command:`, with a truncated checkpoint of its own."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.user import User

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
INTEROP, TRAINER = ROOT / ".venv" / "interop", ROOT / "tests/interop/trainer_program.py"


def submit(user: User, folder: Path, steps: int, *settings: str) -> str:
    words = [sys.executable, str(TRAINER), "--folder", str(folder), "--steps", str(steps), "--every", "5"]
    command = f"command=[{', '.join(repr(word) for word in words)}]"
    shape = ["cluster.nodes=1", "cluster.ranks_per_node=2", f"+env.PYTHONPATH={INTEROP}"]
    return str(user.submit("torchrun-script", command, *shape, *settings)["run"])


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("torn", ["model.safetensors", "optimizer.pt"])
def test_a_torn_checkpoint_of_the_trainer(user: User, tmp_path: Path, torn: str, known: bool) -> None:
    out = tmp_path / "hf" / "out"
    assert user.wait(submit(user, tmp_path / "hf", 15)) == 0
    cut(out / "checkpoint-15" / torn)
    settings = [f"checkpoints.path={out}"] if known else []
    run = submit(user, tmp_path / "hf", 20, *settings)
    code, shown = user.wait(run), user.show(run)
    if known:
        assert (code, shown["state"], shown["last_checkpoint"]["step"]) == (0, "SUCCEEDED", 20)
        (attempt,) = shown["attempts"]
        assert attempt["generations"] == 1, "the Trainer is given the intact checkpoint before it"
        (damaged,) = [row for row in shown["checkpoints"] if row["step"] == 15]
        assert f"is damaged: {torn} is not a complete" in damaged["reason"]
        steps = [json.loads(line)["step"] for line in (tmp_path / "hf" / "losses.jsonl").read_text().splitlines()]
        assert steps == [*range(1, 16), *range(11, 21)]
    else:
        assert (code, shown["state"]) == (8, "FAILED")
        # More than three where loading takes so long that an end without its traceback may be one of training.
        assert re.search(r"[3-9] times in a row within", shown["reason"])
        lines = shown["last_lines"]
        assert any("Error" in line for line in lines), lines
        assert (out / "checkpoint-15" / torn).exists()
