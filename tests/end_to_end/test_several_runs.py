"""A sweep and a successor on this machine while controllers are killed, and a shell beside a live run."""

import sys
from typing import Any

import pytest

from tests.end_to_end.user import ONE_NODE, User

pytestmark = pytest.mark.multi
SHORT = [*ONE_NODE, "train.steps=8"]


def sweep_of(user: User) -> list[dict[str, Any]]:
    return list(user.ask("status", "--sweep", "scan"))


def periods(user: User, runs: list[str]) -> list[tuple[str, str]]:
    """Return the start and end of each run's attempts."""
    attempts = [attempt for run in runs for attempt in user.show(run)["attempts"]]
    return sorted((attempt["started_at"], attempt["ended_at"]) for attempt in attempts)


@pytest.mark.timeout(400)
def test_a_sweep_and_its_successor_survive_killed_controllers(user: User) -> None:
    fixed = [*SHORT, f"cluster.root={user.root}", "cluster.kind=local", "validation.every=8", "validation.batches=1"]
    words = ["sweep", "tiny-gpt", *fixed, "-p", "train.seed=1:2", "-n", "scan", "--max", "1"]
    assert [row["run"] for row in user.ask(*words)["runs"]] == ["scan-1", "scan-2"]
    user.until(lambda: sweep_of(user)[0]["state"] != "CREATED", 60, "the first run's job")
    user.kill_controller()
    assert all(not row["created"] for row in user.ask(*words)["runs"]), "and a new controller was started"
    last = user.ask(
        "submit", "tiny-gpt", *SHORT, f"cluster.root={user.root}", "--cluster", "local", "--after", "scan-2",
        "-n", "last",
    )  # fmt: skip
    assert (last["run"], last["job_id"], last["after"]) == ("last-1", None, "scan-2")
    user.until(lambda: "waits until scan-2 has succeeded" in user.status("last-1")["reason"], 60, "the reason")
    user.until(lambda: sweep_of(user)[0]["state"] == "SUCCEEDED", 180, "the end of the first run")
    user.kill_controller()
    assert user.run("controller", "start").returncode == 0
    assert user.wait("last-1") == 0
    rows = sweep_of(user)
    assert [row["state"] for row in rows] == ["SUCCEEDED", "SUCCEEDED"]
    assert all(row["validation"]["val_loss"] > 0 for row in rows)
    assert rows[0]["loss"] != rows[1]["loss"]
    spans = periods(user, ["scan-1", "scan-2", "last-1"])
    assert len(spans) == 3
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)), "one after the other"


def test_a_shell_beside_a_local_run_has_its_environment(user: User) -> None:
    user.environment["HUSH"] = "s3cret-value"
    run = user.submit("tiny-gpt", *SHORT, *user.slowly(), "+env.COLOUR=blue", "env_from=[HUSH]")["run"]
    user.until(lambda: user.step(run) >= 1, 120, "the first step")
    code = "import os, sys; print(os.environ['COLOUR'], os.environ['HUSH'], os.getcwd(), sys.prefix); sys.exit(3)"
    done = user.run("shell", run, "--", "python", "-c", code)
    assert done.returncode == 3, done.stderr
    assert done.stdout.split() == ["blue", "s3cret-value", str(user.run_dir(run).path), sys.prefix]
    before = user.status(run)["generations"]
    assert user.run("shell", run, "--node", "1").returncode == 2
    user.hurry()
    assert user.wait(run) == 0
    assert user.status(run)["generations"] == before
    over = user.run("shell", run)
    assert (over.returncode, f"{run} is SUCCEEDED: it has no job" in over.stderr) == (4, True)
