"""`examples/train_fsdp2.py` under orch: every fault ends with the bits of the undisturbed run."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.user import User

pytestmark = [pytest.mark.multi, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_fsdp2.py"
STEPS = 400
STEP = "            orch.step(step, loss=loss)\n"
PACE = """            if (FOLDER / "slow").exists():
                __import__("time").sleep(0.5)
"""
"""Lines that make steps slow while a file exists, so that a run cannot end before a test has disturbed it."""


def submit(user: User, name: str, *, nodes: int = 2, steps: int = STEPS) -> str:
    """Submit the example with two ranks; the file `slow` in the run's folder makes its steps slow."""
    text = EXAMPLE.read_text()
    assert text.count(STEP) == 1
    (user.folder / EXAMPLE.name).write_text(text.replace(STEP, STEP + PACE))
    (user.folder / name).mkdir()
    words = json.dumps([sys.executable, str(user.folder / EXAMPLE.name), str(user.folder / name), str(steps)])
    shape = [f"cluster.nodes={nodes}", f"cluster.ranks_per_node={2 // nodes}", f"name={name}"]
    settings = ["recovery.backoff=0.2", "detection.hang.least=10"]
    return str(user.submit("torchrun-script", f"command={words}", *shape, *settings)["run"])


def result(user: User, name: str) -> dict[str, Any]:
    return dict(json.loads((user.folder / name / "final.json").read_text()))


def committed(user: User, run: str) -> list[Path]:
    return sorted(user.run_dir(run).checkpoints.glob("step-*/COMMIT"))


def train_a_while(user: User, run: str) -> None:
    """Wait until the second checkpoint is committed."""
    user.until(lambda: len(committed(user, run)) > 1, 180, "two checkpoints", every=0.02)


def ranks(user: User) -> list[psutil.Process]:
    """Return the processes of the ranks, in order."""
    found = [one for one in user.processes("") if EXAMPLE.name in " ".join(one.cmdline()[:3])]
    mine = {one.pid for one in found}
    return sorted((one for one in found if one.ppid() not in mine), key=lambda one: int(one.environ()["RANK"]))


def kill_rank(user: User, run: str) -> None:
    ranks(user)[1].kill()


def stop_rank(user: User, run: str) -> None:
    ranks(user)[1].send_signal(signal.SIGSTOP)


def kill_node(user: User, run: str) -> None:
    agent = psutil.Process(ranks(user)[1].ppid()).parent()
    assert agent is not None
    for one in [*agent.children(recursive=True), agent]:
        one.kill()


def preempt(user: User, run: str) -> None:
    agent = psutil.Process(ranks(user)[0].ppid()).parent()
    assert agent is not None
    agent.send_signal(signal.SIGUSR2)


def damage_newest(user: User, run: str) -> None:
    """Stop both ranks, change a byte of the newest checkpoint, and kill a rank."""
    both = ranks(user)
    for one in both:
        one.suspend()
    newest = committed(user, run)[-1].parent
    file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 255]))
    both[0].kill()
    both[1].resume()


@pytest.fixture(scope="module")
def bits() -> dict[str, Any]:
    return {}


def undisturbed(user: User, bits: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the undisturbed run, which is trained once."""
    if not bits:
        run = submit(user, "calm")
        assert user.wait(run) == 0
        bits.update(result(user, "calm"))
    return bits


def test_a_killed_rank_costs_no_bit_and_its_checkpoints_are_those_of_a_workload(user: User) -> None:
    run = submit(user, "killed", nodes=1, steps=160)
    train_a_while(user, run)
    slow = user.folder / "killed" / "slow"
    slow.touch()
    assert user.ask("save", run)["step"] > 20
    kill_rank(user, run)
    slow.unlink()
    assert user.wait(run) == 0
    shown = user.show(run)
    (attempt,) = shown["attempts"]
    assert attempt["generations"] == 2
    assert attempt["generation_list"][1]["resumed_from"] >= 20
    rows = user.ask("ckpt", "ls", run)
    assert [row["step"] for row in rows] == [160, 140, 120]
    verified = user.ask("ckpt", "verify", f"{run}@160", "--level", "2")
    assert [row["ok"] for row in verified] == [True]


@pytest.mark.proof
@pytest.mark.parametrize("fault", [kill_rank, stop_rank, kill_node, preempt, damage_newest])
def test_every_fault_ends_with_the_same_bits(
    user: User, bits: dict[str, Any], fault: Callable[[User, str], None]
) -> None:
    calm, name = undisturbed(user, bits), fault.__name__.replace("_", "-")
    run = submit(user, name)
    train_a_while(user, run)
    before = len(committed(user, run))
    fault(user, run)
    assert user.wait(run, 400) == 0
    assert result(user, name) == calm
    attempts = user.show(run)["attempts"]
    assert len(attempts) == 1 + (fault in (kill_node, preempt))
    refused = any('"checkpoint.refused"' in path.read_text() for path in user.run_dir(run).path.rglob("ranks-*.jsonl"))
    assert refused == (fault is damage_newest)
    if fault is preempt:  # the save before the end loses no step
        assert committed(user, run)[before:]
        assert attempts[1]["generation_list"][0]["resumed_from"] == attempts[0]["last_step"]
