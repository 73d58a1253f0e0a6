"""The tables of `orch show`: when attempts and generations began and ended, and which checkpoints are pinned."""

import time
from pathlib import Path

import pytest

from checkpointing.retention.garbage import pin
from checkpointing.storage.backends import LocalStorage
from orchestrator.cli.runs.show import ATTEMPTS, attempt_table
from orchestrator.cli.terminal.render import Screen
from orchestrator.cli.terminal.tables import layout
from orchestrator.registry.records import Attempt, Generation
from orchestrator.states import AttemptState, RunState
from tests.orchestrator.cli.conftest import Seeds, Type
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


def test_a_generation_whose_end_nobody_reported_ended_with_its_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    """The controller has concluded the attempt before its last events were written."""
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


def test_moments_in_reasons_stand_in_the_time_zone_of_all_others(
    orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason is stored in UTC; a screen with local times beside it shows it in local time, too."""
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


def test_what_only_looks_like_a_moment_is_left_alone() -> None:
    assert show_moments("at 9999-99-99 99:99:99Z, 1970-01-12 13:46:40Zulu", lambda at: "moved") == (
        "at 9999-99-99 99:99:99Z, 1970-01-12 13:46:40Zulu"
    )
