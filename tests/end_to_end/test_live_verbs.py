"""Reports of drills and demos with their own runs; test_local drills a live run."""

import json

import pytest

from tests.end_to_end.user import User

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(400)]


def test_a_stopped_rank_is_named_with_its_evidence(user: User) -> None:
    done = user.run("drill", "--demo", "stop-rank", "--json", "--root", str(user.root), timeout=300)
    card = json.loads(done.stdout)["data"]
    assert (done.returncode, card["passed"], card["named"], card["failure"]) == (0, True, "rank 1", "hang")
    assert card["detected_s"] < 30
    assert (user.root / card["run"] / card["evidence"] / "verdict.json").exists()
    (incident,) = user.show(card["run"])["incidents"]
    assert (incident["kind"], incident["rank"], incident["evidence_there"]) == ("stopped", 1, True)
    assert "restart 1 of 5 in place" in incident["done"]


def test_the_demo_of_restore_tests_finds_the_damage_and_what_is_good_before_it(user: User) -> None:
    small = ("cluster.nodes=1", "cluster.ranks_per_node=2", "parallel.tp=1")
    done = user.run("demo", "restore-test", *small, "--json", "--root", str(user.root), timeout=300)
    told = json.loads(done.stdout)["data"]
    assert (done.returncode, told["passed"], told["wrong"]) == (0, True, [])
    assert [(test["step"], test["layout"], test["verdict"]) for test in told["tests"]] == [
        (10, "same", "RESTORED"), (10, "1", "RESTORED"), (30, "1", "CORRUPT"), (20, "1", "RESTORED"),
    ]  # fmt: skip
    assert [test["evidence"].get("compared") for test in told["tests"]] == [3, 3, None, 3]
    assert f"{told['damaged']['file']} chunk 0: digest differs (model/" in told["tests"][2]["reason"]
    checkpoints = user.ask("ckpt", "ls", told["run"])
    assert {row["step"]: row["trust"] for row in checkpoints} == {10: "RESTORED", 20: "RESTORED", 30: "CORRUPT"}


def test_saves_that_fail_are_reported_and_end_in_a_new_job(user: User) -> None:
    done = user.run("drill", "--demo", "full-disk", "--json", "--root", str(user.root), timeout=380)
    card = json.loads(done.stdout)["data"]
    assert (done.returncode, card["passed"], card["failure"]) == (0, True, "storage"), done.stderr
    assert card["noticed"] == f"file size limit reached (ulimit -f) ({user.root}/{card['run']}/checkpoints)"
    assert card["steps_lost"] == 21, "max_unsaved_steps is 20"
    first, second = user.show(card["run"])["attempts"]
    assert (first["failure"]["kind"], second["resumed_from"]) == ("storage", 20)
