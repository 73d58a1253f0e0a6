"""Runs on simulated nodes finish although they are killed in every way that one machine allows."""

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.user import (
    CALM,
    ONE_NODE,
    SMALL,
    TINY,
    User,
    assert_gone,
    assert_no_step_twice_at_once,
    compare,
    final,
)

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]
KILL = "drill.events=[{kind: kill-rank, rank: 1, step: 11}]"
LAUNCH_POINTS = (
    "before_submit", "after_submit", "after_find", "after_adopt", "after_submitted", "after_go", "after_release",
)  # fmt: skip
SAMPLE = "after_submit"
"""Failpoint of the cancelled run's launch; the proof covers the others."""


def test_a_killed_rank_without_a_controller(user: User, calm: tuple[User, str]) -> None:
    killed = user.submit("tiny-gpt", *CALM, *user.slowly(), KILL)["run"]
    user.until(lambda: user.step(killed), 90, "a first step, until which the job needs a controller")
    assert user.kill_controller() >= 1  # a submit on a busy machine may have started a second one, which waits
    user.hurry()
    user.until(lambda: user.step(killed) > 12, 90, "training without a controller")
    assert user.wait(killed) == 0

    shown = user.show(killed)
    (attempt,) = shown["attempts"]
    assert attempt["generations"] == 2
    assert {line["generation"] for line in user.steps(killed)} == {1, 2}
    assert user.status(killed)["state"] == "SUCCEEDED"
    compare(user, killed, calm)

    # It did not go by way of the disk: the memory of the ranks' copies outlives them.
    again = attempt["generation_list"][1]
    assert (again["resumed_from"], again["tier"]) == (8, "memory")
    assert "resumed from memory" in user.run("show", killed).stdout
    assert all(row["stall"] is not None for row in shown["checkpoints"])
    assert all("stall" in line for line in user.steps(killed))
    goes_on_with_more_steps(user, killed)


def goes_on_with_more_steps(user: User, run: str) -> None:
    """Check that an ended run continues with changed settings."""
    more = ["train.steps=18", "optimizer.lr=0.001", "cluster.nodes=1", "parallel.dp_shard=0", "drill.events=[]"]
    assert user.run("resume", run, *more, "--accept", "drill.events").returncode == 0
    assert user.wait(run) == 0
    longer = user.show(run)
    assert (longer["state"], longer["step"], longer["total_steps"]) == ("SUCCEEDED", 18, 18)
    assert [attempt["resumed_from"] for attempt in longer["attempts"]] == [None, 16]
    assert steps_of(user, run, 2) == [17, 18]
    changed = {(item["attempt"], item["key"]) for item in longer["config_changes"]}
    assert changed == {(2, word.partition("=")[0]) for word in more}
    assert "changed  from attempt 2 on: train.steps 16 -> 18" in user.run("show", run).stdout


@pytest.mark.proof
def test_a_memory_that_is_damaged_is_not_trusted(user: User) -> None:
    slow = "drill.events=[{kind: slow-rank, rank: 1, step: 18, value: 0.5}]"
    run = user.submit("tiny-gpt", *SMALL, "checkpoint.every=8", slow)["run"]
    user.until(lambda: user.step(run) >= 18, 90, "training")
    user.until(lambda: list(user.run_dir(run).checkpoints.glob("step-00000016*/COMMIT")), 30, "a checkpoint")
    victim = next(process for process in user.processes("orch-rank") if process.name() == "orch-rank-1")
    victim.suspend()
    for arena in Path(f"/proc/{victim.pid}/fd").iterdir():
        if "orch-arena" in os.readlink(arena):
            with arena.open("r+b") as memory:
                memory.seek(os.path.getsize(arena) // 2)
                memory.write(b"\xff" * 65536)
    victim.kill()
    assert user.wait(run) == 0
    (attempt,) = user.show(run)["attempts"]
    again = attempt["generation_list"][1]
    assert again["tier"] not in ("", "memory")
    assert again["resumed_from"] == 16
    seen: dict[int, set[float]] = {}
    for line in user.steps(run):
        seen.setdefault(line["step"], set()).add(line["loss"])
    assert set(seen) == set(range(1, 31))
    assert all(len(found) == 1 for found in seen.values()), "a replayed step differs"


@pytest.mark.proof  # a sample of it is in test_log_rotation
def test_a_killed_agent_leaves_nothing_and_the_run_goes_on_in_a_new_attempt(user: User) -> None:
    run = user.submit("tiny-gpt", *SMALL)["run"]
    user.until(lambda: user.step(run) > 10, 90, "training")
    victim = user.processes("orch-agent")[-1]
    family = victim.children(recursive=True)
    assert family
    victim.kill()
    assert_gone(family)
    assert user.wait(run) == 0
    first, *later = user.show(run)["attempts"]
    assert first["failure"]["kind"] in ("agent_lost", "unknown")
    assert later
    assert_no_step_twice_at_once(user, run)


def submit_and_die(user: User, point: str, *settings: str) -> str:
    """Submit a run from a process that dies at this point of the launch; return the run, which continues."""
    submitted = user.run(
        "submit", "tiny-gpt", f"cluster.root={user.root}", "cluster.kind=local", *settings, "--no-controller",
        ORCH_FAILPOINT=point,
    )  # fmt: skip
    assert submitted.returncode == -signal.SIGKILL, submitted.stderr
    return str(user.ask("status", "--all")[0]["run"])


@pytest.mark.proof
@pytest.mark.parametrize("point", sorted({*LAUNCH_POINTS} - {SAMPLE}))
def test_a_controller_killed_at_any_point_of_the_launch(user: User, point: str) -> None:
    run = submit_and_die(user, point, *ONE_NODE, "train.steps=6")
    assert user.wait(run) == 0
    assert user.status(run)["state"] == "SUCCEEDED"
    assert_no_step_twice_at_once(user, run)
    assert {line["attempt"] for line in user.work(run)} == {1}


def test_a_run_from_an_interrupted_launch_to_a_bug(
    user: User,
) -> None:
    endless = ["train.steps=2000", "checkpoint.every=1000"]
    run = submit_and_die(user, SAMPLE, *SMALL, *TINY, *user.slowly(), *endless)
    assert user.run("controller", "start").returncode == 0
    user.until(lambda: user.step(run) >= 3, 120, "training")
    is_looked_into_saved_and_hit(user, run)
    assert {line["attempt"] for line in user.work(run)} == {1}
    assert_no_step_twice_at_once(user, run)

    cancelled(user, run)
    first = user.status(run)["last_checkpoint"]["step"]
    assert first >= 3
    assert user.run("resume", run, "cluster.nodes=1", "cluster.ranks_per_node=2").returncode == 0
    user.until(lambda: len(steps_of(user, run, 2)) > 3, 90, "training after resume")
    assert steps_of(user, run, 2)[0] == first + 1

    cancelled(user, run)
    damaged = user.status(run)["last_checkpoint"]["step"]
    assert damaged > first
    shard = flip_a_bit(user.run_dir(run).checkpoints, damaged)
    verified = user.run("ckpt", "verify", f"{run}@latest", "--level", "2")
    assert verified.returncode == 7
    assert shard.name in verified.stdout + verified.stderr
    user.hurry()
    bug = f"drill.events=[{{kind: raise, rank: 1, step: {first + 2}, attempt: 3, generation: 0}}]"
    assert user.run("resume", run, bug, "--accept", "drill.events").returncode == 0
    assert user.wait(run) == 8
    assert steps_of(user, run, 3)[0] == first + 1
    assert {row["step"]: row["trust"] for row in user.show(run)["checkpoints"]}[damaged] == "CORRUPT"
    failure = user.show(run)["attempts"][-1]["failure"]
    assert (failure["kind"], failure["rank"]) == ("user_error", 1)
    assert "Traceback" in user.run("logs", run, "--rank", "first-error").stdout


def is_looked_into_saved_and_hit(user: User, run: str) -> None:
    saved = user.ask("save", run)
    assert saved["answer"] == f"saved at step {saved['step']}"
    assert list(user.run_dir(run).checkpoints.glob(f"step-{saved['step']:08d}*/COMMIT"))

    threads = user.ask("attach", run, "--stack")["threads"]
    assert {thread["rank"] for thread in threads} == {0, 1}
    assert {thread["node"] for thread in threads} == {"local-0", "local-1"}
    calls = [frame["function"] for thread in threads if thread["rank"] == 1 for frame in thread["frames"]]
    assert "rank_main" in calls

    seen = user.ask("top", run)
    assert seen["step"] >= saved["step"]
    assert [(row["rank"], row["node"]) for row in seen["ranks"]] == [(0, "local-0"), (1, "local-1")]

    card = user.ask("drill", run, "kill-rank", "--rank", "1")
    assert (card["named"], card["failure"], card["passed"]) == ("rank 1", "rank_killed", True)
    assert card["detected_s"] < 5


def test_branching_and_a_rebuilt_registry(
    calm: tuple[User, str],
) -> None:
    user, first = calm
    for words, message in (
        (["resume", first, "train.seed=2"], "train.seed cannot"),
        (["submit", "--from", f"{first}@4", "train.seed=2"], "train.seed must match"),
    ):
        refused = user.run(*words)
        assert refused.returncode == 4
        assert message in refused.stderr

    second = user.ask("submit", "--from", f"{first}@12", "checkpoint.keep=2")["run"]
    assert user.wait(second) == 0
    branched = user.show(second)
    assert (branched["imported"]["source"], branched["attempts"][0]["resumed_from"]) == (f"{first}@12", 12)
    assert [line["step"] for line in user.steps(second)] == [13, 14, 15, 16]
    assert final(user, second)["weights_digest"] == final(user, first)["weights_digest"]

    before = user.show(first)
    assert user.run("controller", "stop").returncode == 0
    registry = Path(user.environment["ORCH_HOME"]) / "registry.db"
    for path in registry.parent.glob("registry.db*"):
        path.unlink()
    assert user.run("db", "rebuild", "--root", str(user.root)).returncode == 0
    after = user.show(first)
    for key in ("state", "step", "config_digest", "checkpoints"):
        assert after[key] == before[key], key


def cancelled(user: User, run: str) -> None:
    """Cancel the run and wait until all of its processes have ended."""
    assert user.run("cancel", run).returncode == 0
    assert user.wait(run) == 10
    user.until(lambda: not user.processes("orch-agent") and not user.processes("orch-rank"), 30, "an end")


def steps_of(user: User, run: str, attempt: int) -> list[int]:
    return [line["step"] for line in user.steps(run) if line["attempt"] == attempt]


def flip_a_bit(checkpoints: Path, step: int) -> Path:
    """Damage the largest shard of this step's checkpoint; return the shard."""
    (folder,) = checkpoints.glob(f"step-{step:08d}*")
    shard = max(folder.glob("*.distcp"), key=os.path.getsize)
    with shard.open("r+b") as stream:
        stream.seek(shard.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    return shard
