"""`orch show`: attempts, checkpoints, incidents, restore tests and smaller attempts."""

import time
from pathlib import Path
from typing import Any

import pytest

from checkpointing.retention.garbage import pin
from checkpointing.storage.backends import LocalStorage
from orchestrator.cli.runs.show import ATTEMPTS, attempt_table
from orchestrator.cli.terminal.render import Screen
from orchestrator.cli.terminal.tables import layout
from orchestrator.recovery.elastic_policy import choose_smaller_world, on_nodes
from orchestrator.registry.records import Attempt, Generation, Notice
from orchestrator.states import AttemptState, RunState, Trust
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from trainer.protocol.events import EventKind
from trainer.protocol.restore_test import Outcome
from trainer.protocol.run_dir import RunDir
from trainer.protocol.time_spans import show_moments, stored_moment

START, END = 1790000000.0, 1790000100.0


def attempt(**more: object) -> Attempt:
    known = {"run": "r-1", "number": 1, "state": AttemptState.ENDED, "nonce": "0" * 8, "job_name": "j"}
    return Attempt(**{**known, "started_at": START, "ended_at": END, "reason": "scancelled", **more})


def printed(capsys: pytest.CaptureFixture[str], *generations: Generation, of: Attempt) -> list[list[str]]:
    screen = Screen()
    screen.utc = True
    attempt_table(screen, [of], list(generations))
    title, *rows = capsys.readouterr().out.splitlines()
    starts = [title.index(name) for name in ("START", "END", "TOOK", "ENDED BY")]
    starts[2] -= 1  # aligned right, and wider than its title
    return [[row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for row in rows]


def test_when_an_attempt_and_its_generations_began_and_ended(capsys: pytest.CaptureFixture[str]) -> None:
    first = Generation(run="r-1", attempt=1, number=1, started_at=START + 5, ended_at=START + 30, reason="rank 1 died")
    rows = printed(capsys, first, of=attempt())
    assert [row[:2] for row in rows] == [
        ["09-21 14:13:20Z", "09-21 14:15:00Z"],
        ["09-21 14:13:25Z", "09-21 14:13:50Z"],
    ]


def test_unreported_generation_ends_with_its_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    cut = Generation(run="r-1", attempt=1, number=1, started_at=START + 5)
    assert printed(capsys, cut, of=attempt())[1] == ["09-21 14:13:25Z", "09-21 14:15:00Z", "1m35s", "with its attempt"]


def test_a_generation_that_trains_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    live = Generation(run="r-1", attempt=1, number=1, started_at=time.time() - 60)
    of = attempt(state=AttemptState.RUNNING, ended_at=None, started_at=time.time() - 90)
    rows = printed(capsys, live, of=of)
    assert [row[1] for row in rows] == ["", ""]
    assert rows[1][3] == ""


def test_times_are_the_first_to_go_on_a_narrow_terminal() -> None:
    cells = {column: ["x" * 10] for column in ATTEMPTS}
    kept = [[column.title for column in layout(cells, width).widths] for width in range(40, 200)]
    orders = {tuple(titles) for titles in kept}
    assert tuple(column.title for column in ATTEMPTS) in orders
    for titles in orders:
        assert "START" not in titles or "END" in titles
        assert "END" not in titles or {"NODES", "JOB", "TOOK"} <= set(titles)


def test_the_pins_of_checkpoints_are_shown(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    run = seeds.run()
    for step in (20, 40, 60):
        seeds.checkpoint(run, step)
    storage = LocalStorage(RunDir(seeds.root / run).checkpoints)
    pin(storage, "step-00000020.001-0123abcd", "before the learning rate", 1.0)
    pin(storage, "step-00000040.001-0123abcd", "", 1.0)
    section = orch("show", run).out.partition("CHECKPOINT")[2]
    lines = {line.split()[0]: line for line in section.splitlines() if "VERIFIED" in line}
    assert "before the learning rate" in lines["20"]
    assert lines["40"].split()[-1] == "pinned"
    assert "pinned" not in lines["60"]
    found = {row["step"]: (row["pinned"], row["pin"]) for row in orch("show", run, "--json").data["checkpoints"]}
    assert found == {20: (True, "before the learning rate"), 40: (True, ""), 60: (False, None)}


def test_pins_of_a_folder_that_is_not_visible_are_not_known(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.checkpoint(run, 20)
    assert orch("show", run, "--json").data["checkpoints"][0]["pinned"] is False


def test_time_zone_of_reasons(orch: Type, seeds: Seeds, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        run, reason = seeds.run(), f"node lost once; next try at {stored_moment(1_000_000.0)}; the last one: its node"
        seeds.store.move_run(run, RunState.RECOVERING, reason, epoch=seeds.epoch, now=time.time())
        for verb in ("show", "status"):
            assert "next try at 1970-01-12 08:46:40;" in " ".join(orch(verb, run).out.split()) or verb == "status"
            assert "1970-01-12 13:46:40Z" in orch(verb, run, "--utc").out
            assert "1970-01-12 13:46:40Z" in orch(verb, run, "--json").out
    finally:
        monkeypatch.undo()
        time.tzset()


def test_text_that_looks_like_a_time() -> None:
    assert show_moments("at 9999-99-99 99:99:99Z, 1970-01-12 13:46:40Zulu", lambda at: "moved") == (
        "at 9999-99-99 99:99:99Z, 1970-01-12 13:46:40Zulu"
    )


def notice(seeds: Seeds, run: str, what: EventKind, /, generation: int = 1, **data: Any) -> None:
    seq = len(seeds.store.notices(run)) + 1
    seeds.store.put_notice(
        Notice(
            run=run, attempt=1, source="coordinator", seq=seq, kind=what, generation=generation, time=100.0 + seq,
            node=str(data.get("node") or ""), data=data,
        ),
        epoch=seeds.epoch,
    )  # fmt: skip


def hang(seeds: Seeds, run: str, **more: Any) -> None:
    fields = {
        "name": "g001-stopped", "kind": "stopped", "rank": 3, "node": "n2", "phase": "forward", "step": 60,
        "reason": "rank 3 on n2 stopped first", "waiting": [0, 1, 2], "detected": 3.1,
        "evidence": "attempts/001/evidence/g001-stopped",
    }  # fmt: skip
    notice(seeds, run, EventKind.INCIDENT, **{**fields, **more})


def test_an_incident_is_listed_with_its_evidence_and_what_was_done(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    hang(seeds, run)
    reason = "rank 3 on n2 stopped first; restart 1 of 5 in place"
    seeds.store.put_generation(
        Generation(run=run, attempt=1, number=1, started_at=100.0, ended_at=110.0, reason=reason), epoch=seeds.epoch
    )
    (found,) = orch("show", run, "--json").data["incidents"]
    bundle = RunDir(seeds.root / run).attempt(1).incident("g001-stopped")
    assert found == {
        "time": "1970-01-01T00:01:41.000Z", "attempt": 1, "generation": 1, "name": "g001-stopped", "kind": "stopped",
        "rank": 3, "node": "n2", "phase": "forward", "step": 60, "reason": "rank 3 on n2 stopped first",
        "waiting": [0, 1, 2], "detected": 3.1, "withdrawn": False, "evidence": str(bundle), "evidence_there": False,
        "done": reason, "observed": False,
    }  # fmt: skip
    assert "attempts/001/evidence/g001-stopped (gone)" in orch("show", run).out
    bundle.mkdir(parents=True)
    shown = orch("show", run).out
    assert "(gone)" not in shown
    assert "restart 1 of 5 in place" in shown
    assert orch("show", run, "--json").data["incidents"][0]["evidence_there"] is True


def test_withdrawn_incident(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    hang(seeds, run, withdrawn=True)
    (found,) = orch("show", run, "--json").data["incidents"]
    assert (found["withdrawn"], found["done"]) == (True, "nothing: it recovered without help")


def test_tables_of_notices(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    notice(
        seeds, run, EventKind.STRAGGLER, rank=1, node="n1", section="forward", ratio=1.31, step=40, steps=20,
        gpu_hours=0.5, over=False,
    )  # fmt: skip
    notice(seeds, run, EventKind.BATCH_SKIPPED, step=7, position=96, reason="loss nan")
    notice(seeds, run, EventKind.SPARE_USED, node=2, name="n3", instead="n2", reason="its agent is gone")
    notice(seeds, run, EventKind.PREFLIGHT, node=1, name="gpu7", ok=False, reason="/dev/shm is full")
    notice(seeds, run, EventKind.PREFLIGHT, name="gpu8", ok=False, reason="slow", speeds={})
    data = orch("show", run, "--json").data
    assert [(one["rank"], one["ratio"], one["over"]) for one in data["stragglers"]] == [(1, 1.31, False)]
    assert [(one["step"], one["position"]) for one in data["skipped"]] == [(7, 96)]
    assert [(one["name"], one["instead"]) for one in data["spares"]] == [("n3", "n2")]
    assert [(one["node"], one["reason"]) for one in data["unfit"]] == [("gpu7", "/dev/shm is full"), ("gpu8", "slow")]
    shown = orch("show", run).out
    titles = ("stragglers\n", "skipped batches\n", "spare nodes used\n")
    for words in (*titles, "1.31 x", "loss nan", "/dev/shm is full", "gpu7"):
        assert words in shown


def test_other_code_is_named_with_the_digest_of_what_trained(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    notice(seeds, run, EventKind.CODE_RECORDED, digest="ab" * 32)
    notice(seeds, run, EventKind.CODE_CHANGED, digest="cd" * 32, reason="mine changed since the submit", files={})
    notice(seeds, run, EventKind.CODE_CHANGED, digest="", reason="package timm 1.0 -> 2.0 since attempt 1", files={})
    (found, _) = orch("show", run, "--json").data["code_changes"]
    assert (found["attempt"], found["reason"]) == (1, "mine changed since the submit")
    shown = orch("show", run).out
    assert "files cdcdcdcdcdcd (attempt 1)" in shown
    assert "mine changed since the submit" in shown
    assert "package timm 1.0 -> 2.0 since attempt 1" in shown


def test_tables_of_unsaved_state(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    differs = "loss of step 8 is 2.0, was 1.0"
    notice(seeds, run, EventKind.RESTART_DIFFERS, step=8, restored=7, reason=differs)
    notice(seeds, run, EventKind.CHECKPOINT_INCOMPLETE, step=7, reason="workload.k had changed and is not saved")
    data = orch("show", run, "--json").data
    assert [(one["step"], one["restored"], one["reason"]) for one in data["restart_differs"]] == [(8, 7, differs)]
    assert [one["step"] for one in data["incomplete"]] == [7]
    shown = orch("show", run).out
    for words in ("restarts that trained differently\n", differs, "state missing from checkpoints\n", "workload.k had"):
        assert words in shown


def test_a_quiet_run_lists_nothing(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    data = orch("show", run, "--json").data
    assert [data[key] for key in ("incidents", "stragglers", "skipped", "spares", "unfit")] == [[]] * 5
    assert "incidents" not in orch("show", run).out


def test_show_lists_the_newest_five_tests_and_what_is_proven(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    for step in (100, 200):
        seeds.checkpoint(run, step, Trust.RESTORED)
    found = {"rto_seconds": 75.0, "bytes_per_second": 3 * 1024.0**2, "compared": 3}
    for number in range(4):
        seeds.restore_test(run, 100, Outcome.RESTORED, f"early {number}", age=9000.0 - number)
    seeds.restore_test(run, 200, Outcome.RESTORED, "bit for bit", age=600.0, **found)
    seeds.restore_test(run, 200, Outcome.RESTORED, "within 0.02", layout="1", age=400.0)
    seeds.restore_test(run, 200, layout="2x4", age=0.0)
    shown = orch("show", run)
    section = shown.out.partition("\nrestore tests\n")[2].splitlines()
    assert [line.split()[:3] for line in section[1:6]] == [
        ["200", "2x4", "under"], ["200", "1", "RESTORED"], ["200", "same", "RESTORED"], ["100", "same", "RESTORED"],
        ["100", "same", "RESTORED"],
    ]  # fmt: skip
    for word in ("10m00s", "1m15s", "3.0 MiB/s", "3", "bit for bit"):
        assert word in section[3]
    assert section[6] == "newest proven restorable: step 200, 6m40s ago, on same, 1"
    assert f"2 more:  orch restore-tests history {run}" in shown.err


def test_show_tells_programs_the_same(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.checkpoint(run, 100, Trust.RESTORED)
    seeds.checkpoint(run, 200, Trust.CORRUPT)
    tests = [
        seeds.restore_test(run, 200, Outcome.RESTORED, age=90.0),
        seeds.restore_test(run, 100, Outcome.RESTORED, "bit for bit", age=60.0, compared=3),
    ]
    data = orch("show", run, "--json").data
    assert [test["test"] for test in data["restore_tests"]] == tests[::-1]
    assert data["restore_tests"][0]["evidence"] == {"compared": 3}
    assert data["proven"].pop("ended_at") == data["restore_tests"][0]["ended_at"]
    assert data["proven"] == {"step": 100, "checkpoint": "step-00000100.001-0123abcd", "layouts": ["same"]}
    assert data["is_restore_test"] is None


def test_show_says_so_when_nothing_is_proven(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    assert "restored by a test" not in orch("show", run).out
    seeds.checkpoint(run, 100)
    seeds.restore_test(run, 100, Outcome.NOT_FINISHED, "no node")
    assert "\nno test has restored a checkpoint of this run\n" in orch("show", run).out
    assert orch("show", run, "--json").data["proven"] is None
    seeds.restore_test(run, 200, Outcome.RESTORED)  # deleted since
    assert "\nno test has restored a checkpoint that still exists and is good\n" in orch("show", run).out


def test_show_of_a_restore_test(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    steps = [{"step": 101, "loss": 3.25, "grad_norm": 1.5, "lr": 0.001}, {"step": 102, "loss": "nan"}]
    again = [{"loss": 9.0, "grad_norm": 8.0}, {"loss": 3.125, "grad_norm": 1.75, "lr": 0.002}]  # trained twice
    test = seeds.restore_test(
        run, 100, Outcome.SUSPECT, "loss of step 101 differs", layout="1", steps=steps, run_steps={"101": again}
    )
    head, _, below = orch("show", test).out.partition("\n\n")
    assert f"tests    step 100 of {run} on 1   step-00000100.001-0123abcd" in head
    assert "verdict  SUSPECT   loss of step 101 differs" in head
    title, *rows = below.partition("\n\n")[0].splitlines()
    assert title.split("  ")[0] == "STEP"
    assert [row.split() for row in rows] == [
        ["101", "3.25", "3.125", "1.5", "1.75", "0.001", "0.002"], ["102", "nan", "-", "-", "-", "-", "-"],
    ]  # fmt: skip
    told = orch("show", test, "--json").data["is_restore_test"]
    assert (told["run"], told["step"], told["layout"], told["verdict"]) == (run, 100, "1", "SUSPECT")
    assert told["evidence"]["run_steps"] == {"101": again}


def test_a_test_that_goes_on_says_so(orch: Type, seeds: Seeds) -> None:
    test = seeds.restore_test(seeds.run(), 100)
    shown = orch("show", test).out
    assert "verdict  under way\n" in shown
    assert "restored by a test" not in shown


def test_failed_restore_test_is_repeated(orch: Type, seeds: Seeds) -> None:
    run = seeds.run(state=RunState.FAILED, reason="a bug")
    test = seeds.restore_test(run, 100, layout="1")
    seeds.store.move_run(test, RunState.FAILED, "no memory", epoch=seeds.epoch, now=0.0)
    shown = orch("show", test)
    assert f"again:    orch ckpt restore-test {run}@100 --layout 1" in shown.err
    assert "orch resume" not in shown.err
    assert f"orch resume {run}" in orch("show", run).err


@pytest.mark.parametrize(
    "words",
    [
        ("resume", "{test}"),
        ("resume", "{test}", "train.steps=300"),
        ("submit", "--from", "{test}@100"),
        ("submit", "--from", "{test}", "--dry-run"),
        ("ckpt", "pin", "{test}"),
        ("ckpt", "restore-test", "{test}"),
        ("ckpt", "verify", "{test}@all"),
        ("ckpt", "diff", "{test}", "{test}@100"),
        ("ckpt", "export", "{test}", "nowhere"),
    ],
)
def test_restore_test_has_no_checkpoint(orch: Type, seeds: Seeds, words: tuple[str, ...]) -> None:
    run = seeds.run()
    test = seeds.restore_test(run, 100, Outcome.RESTORED, layout="1")
    refused = orch(*(word.format(test=test) for word in words))
    assert refused.code == (4 if words[0] == "resume" else 2)
    assert refused.err.startswith(f"error: {test} is a restore test: ")
    assert f"orch ckpt restore-test {run}@100 --layout 1" in refused.err
    assert seeds.store.user_requests() == []
    assert len(seeds.store.runs()) == 2


def test_restore_test_uses_no_checkpoint_space(orch: Type, seeds: Seeds) -> None:
    test = seeds.restore_test(seeds.run(), 100, Outcome.RESTORED)
    for verb in ("du", "gc", "ls"):
        done = orch("ckpt", verb, test, "--json")
        assert (done.code, done.data) == (0, []), verb
    assert f"{test} is a restore test, and saves nothing" in orch("ckpt", "ls", test).err


WHY = "1 node was missing for 1h01m (recovery.patience=3600)"


@pytest.fixture
def run(seeds: Seeds) -> str:
    name, now = seeds.run(), time.time()
    digest = seeds.store.put_config({"name": "tiny", "cluster": {"nodes": 3}, "train": {"steps": 200}})
    seeds.store.move_attempt(name, 1, AttemptState.ENDED, "n4 is down", epoch=seeds.epoch, now=now, ended_at=now)
    world = choose_smaller_world({"nodes": 3}, {"nodes": 4}, seeds.digest, WHY)
    seeds.store.add_attempt(
        name, nonce="4567cdef", excluded=(), epoch=seeds.epoch, now=now, config_digest=digest, smaller_world=world,
        reason=f"next attempt {on_nodes(world)}",
    )  # fmt: skip
    return name


def test_show_says_how_many_nodes_and_why(orch: Type, run: str) -> None:
    said = " ".join(orch("show", run).out.split())
    assert f"size attempt 2 runs on 3 of 4 nodes: {WHY}" in said
    assert "changed" not in said, "nobody has changed the run's configuration"


def test_events_have_the_decision(orch: Type, run: str) -> None:
    assert f"the attempt is INTENT: next attempt on 3 of 4 nodes: {WHY}" in orch("events", run).out


def test_programs_get_the_numbers(orch: Type, run: str, seeds: Seeds) -> None:
    data = orch("show", run, "--json").data
    assert [attempt["smaller_world"] for attempt in data["attempts"]] == [
        None,
        {"nodes": 3, "spare_nodes": 0, "of": 4, "of_spare_nodes": 0, "reason": WHY, "base": seeds.digest},
    ]
    assert data["config_changes"] == []
    assert data["config_digest"] == seeds.digest
