"""`examples/`: complete programs whose results are bit-identical after a kill."""

import json
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.user import User, assert_exact, final
from tests.slurm.warm_fork_servers import warm_python

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, INTEROP = ROOT / "examples", ROOT / ".venv" / "interop"
ONE_NODE = ["cluster.nodes=1", "cluster.ranks_per_node=2", "recovery.backoff=0.2"]
KILL = "drill.events=[{kind: kill-rank, rank: 1, step: %d}]"
MOST_LINES = 60


def saved_by(user: User) -> None:
    """Copy the examples into the user's folder."""
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy(path, user.folder)


def test_they_are_short_and_all_are_named() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    assert [program.name for program in programs] == ["gpt2.py", "my_cnn.py", "train_ddp.py", "train_fsdp2.py"]
    readme = (EXAMPLES / "README.md").read_text()
    for program in programs:
        assert len(program.read_text().splitlines()) <= MOST_LINES
        assert f"({program.name})" in readme


@pytest.fixture
def gpt2(user: User) -> list[str]:
    if not (INTEROP / "transformers").is_dir():
        pytest.skip("transformers is not installed apart: `make .venv/interop/.ready` does that, as `make test` does")
    saved_by(user)
    return ["./gpt2.yaml", *ONE_NODE, f"+env.PYTHONPATH={INTEROP}"]


def was_killed(user: User, run: str, resumed_from: int) -> None:
    assert user.wait(run) == 0
    (attempt,) = user.show(run)["attempts"]
    assert attempt["generations"] == 2
    assert attempt["generation_list"][1]["resumed_from"] == resumed_from


def test_gpt2_with_tied_embeddings_after_a_kill(user: User, gpt2: list[str]) -> None:
    # With an interpreter of its own nothing of it is imported before there is a run: that takes ten seconds.
    settings = ["train.steps=24", "optimizer.lr=0.004", warm_python(user)]
    run = user.submit(*gpt2, *settings, KILL % 19)["run"]
    was_killed(user, run, 10)
    steps = user.steps(run)
    first, again = ({line["step"]: line["loss"] for line in steps if line["generation"] == one} for one in (1, 2))
    assert {step: first[step] for step in range(11, 19)} == {step: again[step] for step in range(11, 19)}
    assert list(again) == list(range(11, 25))
    assert again[24] < 0.8 * first[1]


@pytest.mark.proof
def test_gpt2_with_tied_embeddings_ends_with_the_same_bits_after_a_kill(user: User, gpt2: list[str]) -> None:
    calm, killed = (user.submit(*gpt2, *drill)["run"] for drill in ([], [KILL % 39]))
    assert user.wait(calm) == 0
    was_killed(user, killed, 30)
    assert_exact(user, killed, calm)
    assert final(user, killed)["weights_digest"] == final(user, calm)["weights_digest"]


def ended(user: User, name: str, *, kill: bool) -> dict[str, float]:
    """Return the final record of `train_ddp.py`; with `kill`, it loses a rank after its first checkpoint."""
    folder = user.folder / name
    words = json.dumps([sys.executable, str(user.folder / "train_ddp.py"), str(folder), "800"])
    run = user.submit("torchrun-script", f"command={words}", *ONE_NODE)["run"]
    if kill:
        user.until(lambda: any(folder.glob("checkpoint-*.pt")), 90, "a checkpoint", every=0.02)
        victim, *_ = [process for process in user.processes("") if is_rank_1(process)]
        victim.kill()
    assert user.wait(run) == 0
    (attempt,) = user.show(run)["attempts"]
    assert attempt["generations"] == 1 + kill
    return dict(json.loads((folder / "final.json").read_text()))


def is_rank_1(process: psutil.Process) -> bool:
    return process.environ().get("RANK") == "1" and any(word.endswith("train_ddp.py") for word in process.cmdline())


@pytest.mark.proof
def test_an_unchanged_torchrun_script_ends_with_the_same_bits_after_a_kill(user: User) -> None:
    saved_by(user)
    calm, killed = ended(user, "calm", kill=False), ended(user, "killed", kill=True)
    assert calm.pop("from") == 1
    assert killed.pop("from") > 1
    assert killed == calm
