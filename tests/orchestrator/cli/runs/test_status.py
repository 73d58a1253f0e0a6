"""`orch status`, `orch show` and `orch` alone: shapes that scripts depend on, and words for people."""

import json
import sqlite3
import time
from pathlib import Path

import pytest

from orchestrator.cli.runs.status import TABLE
from orchestrator.cli.terminal.render import progress
from orchestrator.cli.terminal.tables import layout
from orchestrator.registry.records import Generation
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.refusals import waiting_words
from orchestrator.states import RunState, Trust
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.cli.forked_orch import on_a_terminal
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.restore_test import Outcome

STATUS_KEYS = [
    "run", "state", "step", "total_steps", "loss", "attempts", "generations", "job_id", "cluster", "nodes",
    "last_checkpoint", "reason", "updated_at", "last_lines", "slurm_cluster", "restore_test",
    "tags", "eta_s", "expected_start", "after", "sweep",
]  # fmt: skip
ATTEMPT_KEYS = [
    "attempt", "state", "job_id", "sluid", "restarts", "nodes", "excluded", "started_at", "ended_at", "resumed_from",
    "last_step", "generations", "failure", "decision",
]  # fmt: skip


def test_status_json_has_the_promised_shape(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.checkpoint(run, 100)
    seeds.killed_rank(run)
    answer = orch("status", "--json").answer
    assert list(answer) == ["schema", "time", "data", "warnings"]
    assert answer["schema"] == "orch.status/1"
    assert answer["time"].endswith("Z")
    (row,) = answer["data"]
    assert list(row) == STATUS_KEYS
    age = row["last_checkpoint"].pop("age_s")
    assert 0 <= age < 60
    assert row.pop("updated_at").endswith("Z")
    assert row == {
        "run": "tiny-1", "state": "RUNNING", "step": 120, "total_steps": 200, "loss": 2.5, "attempts": 1,
        "generations": 2, "job_id": "41", "cluster": "local", "nodes": ["n1", "n2"],
        "last_checkpoint": {"step": 100, "trust": "VERIFIED"}, "reason": "", "last_lines": [], "slurm_cluster": None,
        "restore_test": None, "tags": [], "eta_s": None, "expected_start": None, "after": None, "sweep": None,
    }  # fmt: skip


def test_show_json_has_the_promised_shape(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.checkpoint(run, 100)
    seeds.killed_rank(run)
    answer = orch("show", run, "--json").answer
    assert answer["schema"] == "orch.show/1"
    data = answer["data"]
    assert list(data)[: len(STATUS_KEYS)] == STATUS_KEYS
    assert data["config_digest"] == seeds.digest
    assert data["code"] == {"git": "1a2b3c4"}
    assert data["env"] == {"python": "3.11.7"}
    (attempt,) = data["attempts"]
    assert list(attempt)[: len(ATTEMPT_KEYS)] == ATTEMPT_KEYS
    assert attempt["generations"] == 2
    failure = attempt["failure"]
    assert (failure["kind"], failure["rank"], failure["node"]) == ("rank_killed", 1, "n1")
    assert {"kind", "reason", "rank", "node", "evidence"} <= set(failure)
    (saved,) = data["checkpoints"]
    assert {"step", "trust", "bytes", "path", "attempt"} <= set(saved)


def test_show_has_reason_and_next_command(orch: Type, seeds: Seeds) -> None:
    run = seeds.run(state=RunState.HELD, reason="the disk is full")
    seeds.killed_rank(run)
    shown = orch("show", run)
    assert "HELD  the disk is full" in shown.out
    assert "killed by signal 9" in shown.out
    assert f"orch resume {run}" in shown.err


def train(seeds: Seeds, run: str, *, started: float, now: float, step: int) -> None:
    at = time.time()
    generation = Generation(run=run, attempt=1, number=1, started_at=at - started, resumed_from=20)
    seeds.store.put_generation(generation, epoch=seeds.epoch)
    seeds.store.note_run(run, epoch=seeds.epoch, now=at - now, step=step)


def test_eta(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    assert orch("status", "--json").data[0]["eta_s"] is None, "nothing is known of its speed"
    train(seeds, run, started=90.0, now=0.0, step=120)
    assert orch("status", "--json").data[0]["eta_s"] is None, "its start may be most of these 90 s"
    train(seeds, run, started=200_000.0, now=0.0, step=120)  # 2000 s a step, 80 are left
    assert orch("status", "--json").data[0]["eta_s"] == pytest.approx(160_000.0, abs=600.0)
    seeds.checkpoint(run, 100, Trust.DELETED, age=200_000.0)  # since then 10,000 s a step, without the start
    assert orch("status", "--json").data[0]["eta_s"] == pytest.approx(800_000.0, abs=6000.0)
    assert "ETA_S" in orch("status").out.splitlines()[0]
    top = orch("top", run, "--json")
    assert top.data["eta_s"] == pytest.approx(800_000.0, abs=6000.0), "one figure on all screens"
    seeds.store.move_run(run, RunState.HELD, "the disk is full", epoch=seeds.epoch, now=time.time())
    assert orch("status", "--json").data[0]["eta_s"] is None, "it does not train"


@pytest.mark.parametrize(("width", "there"), [(200, True), (120, True), (80, False)])
def test_eta_is_dropped_first(width: int, there: bool) -> None:
    row = {
        "run": "tiny-gpt-12", "state": "RUNNING", "progress": "120/200", "loss": 2.5, "eta_s": 90.0, "tags": [],
        "saved": "100 VERIFIED", "saved_age": 5.0, "tries": "1.2", "job_id": "4711",
        "nodes": ["n1"], "age_s": 3.0, "reason": "",
    }  # fmt: skip
    cells = {column: [column.show(row[column.key])] for column in TABLE}
    titles = [column.title for column in layout(cells, width).widths]
    assert ("ETA" in titles) is there
    assert max(TABLE, key=lambda column: column.drop_order).title == "ETA"


def test_job_that_never_starts_needs_attention(orch: Type, seeds: Seeds) -> None:
    for slug, why in (("waits", "Priority"), ("stuck", "BadConstraints")):
        name = f"{slug}-1"
        reason = f"job 41 is PENDING{waiting_words(why, Resources(nodes=2), name, 0.0)}"
        assert seeds.run(slug, RunState.RUNNING) == name
        seeds.store.move_run(name, RunState.RECOVERING, "preempted", epoch=seeds.epoch, now=1.0)
        seeds.store.move_run(name, RunState.QUEUED, reason, epoch=seeds.epoch, now=2.0)
    needing = [line for line in orch().out.splitlines() if line.startswith("needs you: ")]
    assert len(needing) == 1
    assert needing[0].startswith("needs you: stuck-1 is QUEUED: job 41 is PENDING (BadConstraints): ")
    assert "`orch cancel stuck-1`, then `orch resume stuck-1 cluster.nodes=NUMBER" in needing[0]


def test_a_loss_that_is_not_a_number_is_a_word(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.store.note_run(run, epoch=seeds.epoch, now=time.time(), loss=float("nan"))
    assert orch("status", "--json").data[0]["loss"] == "nan"
    assert "nan" in orch("status").out


def test_pipe_gets_complete_tsv(orch: Type, seeds: Seeds) -> None:
    reason = "a very long reason " * 20
    seeds.run(state=RunState.HELD, reason=reason + "\twith a tab\nand a line break")
    head, row = orch("status").out.splitlines()
    cells = dict(zip(head.split("\t"), row.split("\t"), strict=True))
    assert cells["RUN"] == "tiny-1"
    assert cells["STEP"] == "120"
    assert cells["NODES"] == "n1,n2"
    assert cells["REASON"] == " ".join(reason.split()) + " with a tab and a line break"


def test_status_on_a_terminal(seeds: Seeds) -> None:
    run = seeds.run()
    seeds.checkpoint(run, 100)
    shown = on_a_terminal(seeds.store, "status")
    assert "120/200" in shown
    assert "100 VERIFIED" in shown
    assert "controller ok (last pass" in shown
    assert "\t" not in shown


def test_control_characters_are_removed(orch: Type, seeds: Seeds) -> None:
    seeds.run(state=RunState.HELD, reason="evil \x1b]0;title\x07\x1b[31mred\x1b[0m \x9b2J end")
    shown = orch("status")
    assert "\x1b" not in shown.out
    assert "\x9b" not in shown.out
    assert "evil red 2J end" in shown.out


def test_runs_by_name_beginning_and_last(orch: Type, seeds: Seeds) -> None:
    seeds.run("alpha")
    newest = seeds.run("beta")
    assert [row["run"] for row in orch("status", "alpha-1", "--json").data] == ["alpha-1"]
    assert [row["run"] for row in orch("status", "al", "be", "--json").data] == ["alpha-1", "beta-1"]
    assert orch("status", "@last", "--json").data[0]["run"] == newest


def test_restore_tests_are_not_listed(orch: Type, seeds: Seeds) -> None:
    run = seeds.run("alpha", state=RunState.SUCCEEDED)
    test = seeds.restore_test(run, 100)
    for words in (("status",), ("status", "al"), ("status", "@last")):
        assert [row["run"] for row in orch(*words, "--json").data] == [run], words
    assert orch("--json").data["running"] == []
    assert test not in orch().out
    assert [row["run"] for row in orch("status", "--all", "--json").data] == [test, run]
    assert [row["run"] for row in orch("status", test, "--json").data] == [test]


def test_rm_of_a_checkpoint_is_refused(orch: Type, seeds: Seeds) -> None:
    seeds.run("demo")
    failed = orch("rm", "demo-1@20", "-y")
    assert failed.code == 3
    assert "demo-1@20 is a checkpoint, but a run is required" in failed.err
    assert "orch rm demo-1" not in failed.err


def test_no_such_run_names_near_ones(orch: Type, seeds: Seeds) -> None:
    seeds.run("llama8b")
    for verb in ("status", "show", "wait", "logs", "cancel", "resume"):
        failed = orch(verb, "lama8b-1")
        assert failed.code == 3, verb
        assert failed.err.startswith("error: no run lama8b-1"), verb
        assert "llama8b-1" in failed.err, verb


@pytest.mark.parametrize("words", ["show {}", "ckpt ls {}", "wait {} --timeout 1", "cancel {}", "status {}"])
def test_a_checkpoint_where_a_run_is_needed(orch: Type, seeds: Seeds, words: str) -> None:
    seeds.run("demo")
    for step in ("@20", "@latest"):
        failed = orch(*words.format(f"demo-1{step}").split())
        assert failed.code == 3
        assert failed.err == f"error: demo-1{step} is a checkpoint, but a run is required\n  the run is demo-1\n"
    assert orch("show", "demo-9@20").err.startswith("error: no run demo-9\n")


def test_filters(orch: Type, seeds: Seeds) -> None:
    for _ in range(3):
        seeds.run()
    seeds.run(state=RunState.FAILED, reason="a bug")
    assert len(orch("status", "--json", "-n", 2).data) == 2
    assert len(orch("status", "--json", "--all").data) == 4
    assert [row["state"] for row in orch("status", "--state", "failed", "--json").data] == ["FAILED"]
    refused = orch("status", "--state", "broken")
    assert (refused.code, "'succeeded'" in refused.err) == (2, True)


def test_missing_controller_is_warned_of(orch: Type, seeds: Seeds) -> None:
    seeds.run()
    assert orch("status", "--json").answer["warnings"] == []
    seeds.drop_lease()
    assert [item["code"] for item in orch("status", "--json").answer["warnings"]] == ["no_controller"]
    assert "orch controller" in orch("status").err


def test_overview(orch: Type, seeds: Seeds) -> None:
    running = seeds.run()
    held = seeds.run(state=RunState.HELD, reason="the disk is full")
    done = seeds.run(state=RunState.SUCCEEDED)
    shown = orch()
    assert shown.code == 0
    assert running in shown.out
    assert f"needs you: {held} is HELD: the disk is full" in shown.out
    assert f"orch resume {held}" in shown.out
    assert done not in shown.out


def test_each_run_has_its_newest_finished_restore_test(orch: Type, seeds: Seeds) -> None:
    run, other = seeds.run(), seeds.run()
    seeds.restore_test(run, 100, Outcome.RESTORED, layout="1")
    seeds.restore_test(run, 120)
    rows = {row["run"]: row["restore_test"] for row in orch("status", "--json").data}
    assert rows[other] is None
    assert rows[run].pop("ended_at").endswith("Z")
    assert rows[run] == {"step": 100, "layout": "1", "verdict": "RESTORED"}
    assert orch("show", run, "--json").data["restore_test"]["step"] == 100


@pytest.mark.parametrize("verdict", [Outcome.SUSPECT, Outcome.CORRUPT])
def test_bad_restore_test_is_warned_of(orch: Type, seeds: Seeds, verdict: Outcome) -> None:
    run = seeds.run()
    seeds.restore_test(run, 100, verdict, "loss differs", layout="1")
    words = f"{run}: restore test of step 100 on 1: {verdict}, loss differs"
    for line in (("status",), ("status", run), ("show", run)):
        assert f"warning: {words}; orch restore-tests history {run}\n" in orch(*line).err, line
        (warning,) = orch(*line, "--json").answer["warnings"]
        assert warning["code"] == "bad_restore_test"
    assert f"needs you: {words}\n" in orch().out
    assert f"warning: {words}" not in orch().err
    (told,) = orch("--json").data["bad_restore_tests"]
    assert told.pop("ended_at").endswith("Z")
    assert told == {"run": run, "step": 100, "layout": "1", "verdict": verdict, "reason": "loss differs"}
    seeds.restore_test(run, 100, Outcome.RESTORED, layout="1", age=0.0)
    for line in (("status",), ("show", run), ()):
        shown = orch(*line)
        assert words not in shown.out + shown.err, line


def test_failed_run_needs_attention_for_a_week(orch: Type, seeds: Seeds) -> None:
    for state in (RunState.SUCCEEDED, RunState.FAILED, RunState.HELD):
        seeds.restore_test(seeds.run(str(state).lower(), state=state), 100, Outcome.CORRUPT, age=8 * 86400.0)
        seeds.restore_test(seeds.run(str(state).lower(), state=state), 100, Outcome.CORRUPT, age=6 * 86400.0)
    told = {row["run"] for row in orch("--json").data["bad_restore_tests"]}
    assert told == {"succeeded-2", "failed-2", "held-1", "held-2"}


def test_verbs_without_registry(orch: Type, home: Path) -> None:
    assert orch("status", "--json").data == []
    assert orch().code == 0
    assert orch("show", "x").code == 3
    assert not (home / "registry.db").exists()


@pytest.mark.parametrize("words", [("status",), ("show", "tiny-1"), ("wait", "tiny-1"), ("ckpt", "ls", "tiny-1")])
def test_a_registry_of_a_newer_version_is_refused(orch: Type, seeds: Seeds, home: Path, words: tuple[str, ...]) -> None:
    seeds.run()
    seeds.store.close()
    with sqlite3.connect(home / "registry.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("ALTER TABLE runs RENAME TO runs_of_tomorrow")
    connection.close()
    refused = orch(*words)
    assert refused.code == 6
    assert "newer than this orch" in refused.err
    assert "upgrade" in refused.err


def test_trust_of_what_a_run_would_resume_from(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.checkpoint(run, 50)
    seeds.checkpoint(run, 100, Trust.CORRUPT)
    assert orch("status", "--json").data[0]["last_checkpoint"]["step"] == 50


def test_json_has_only_data_on_stdout(orch: Type, seeds: Seeds) -> None:
    seeds.run()
    for words in (("status",), ("show", "tiny-1"), ("nodes", "ls"), ("ckpt", "ls", "tiny-1"), ("db", "path")):
        for placed in (("--json", *words), (*words, "--json")):
            done = orch(*placed)
            assert done.code == 0, placed
            assert json.loads(done.out)["schema"].startswith("orch."), placed
            assert len(done.out.splitlines()) == 1, placed


def test_last_lines_of_a_command(orch: Type, seeds: Seeds) -> None:
    run = seeds.run(state=RunState.FAILED, reason="rank 1 raised KeyError: 7")
    lines = ("Traceback (most recent call last):", "\x1b]0;evil\x07KeyError: 7")
    failure = Failure(kind=FailureKind.USER_ERROR, reason="it raised", rank=1, node="n1", lines=lines)
    seeds.store.note_attempt(run, 1, epoch=seeds.epoch, failure=failure.to_json())
    said = f"last lines of rank 1 of {run}, on n1:\n  Traceback (most recent call last):\n  KeyError: 7\n"
    assert said in orch("status", run).err
    assert "KeyError: 7\n" not in orch("status").err
    assert orch("status", run, "--json").data[0]["last_lines"] == list(lines)
    shown = orch("show", run)
    assert said in shown.out + shown.err
    assert orch("show", run, "--json").data["attempts"][0]["failure"]["lines"] == list(lines)


def test_unknown_steps_of_a_command(orch: Type, seeds: Seeds) -> None:
    assert (progress(0, 0), progress(40, 0), progress(40, 200)) == ("-", "40", "40/200")
    run = seeds.run()
    seeds.store.note_run(run, epoch=seeds.epoch, now=time.time(), step=0, total_steps=0)
    head, row = orch("status").out.splitlines()
    cells = dict(zip(head.split("\t"), row.split("\t"), strict=True))
    assert (cells["STEP"], cells["TOTAL_STEPS"]) == ("", "")
