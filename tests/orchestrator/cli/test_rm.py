"""`orch rm`: deleted items, refusals, and completion after a kill at any point."""

import json
import os
import pty
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.retention import garbage
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import dump_line
from orchestrator import failpoints
from orchestrator.cli import rm
from orchestrator.controller.actor import Actor
from orchestrator.controller.user_requests import answer_idle
from orchestrator.errors import Precondition
from orchestrator.observed_since import Clock, ObservedSince
from orchestrator.registry.records import Notice
from orchestrator.registry.user_writes import Removal
from orchestrator.states import AttemptState, RunState
from tests.checkpointing.made_checkpoint import make
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.cli.forked_orch import ForkedOrch
from tests.orchestrator.ordinary_user import folder_of_an_ordinary_user
from tests.orchestrator.registry.newer_record import record_newer_attempt

NONCE = "0123abcd"
NAME = f"step-00000050.001-{NONCE}"


def ended_run(seeds: Seeds, state: RunState = RunState.SUCCEEDED, run: str = "") -> str:
    name = run or seeds.run(state=state, reason="all ranks finished")
    seeds.store.move_attempt(name, 1, AttemptState.ENDED, "over", epoch=seeds.epoch, now=time.time())
    folder = seeds.root / name
    (folder / "checkpoints").mkdir(parents=True)
    nonce = seeds.store.attempts(name)[0].nonce
    (folder / "run.json").write_text(dump_line({"name": name, "nonce": nonce}))
    (folder / "config.json").write_text(dump_line({}))
    make(LocalStorage(folder / "checkpoints"), 50, nonce=nonce, now=time.time())
    seeds.checkpoint(name, 50)
    return name


@pytest.fixture
def run(seeds: Seeds) -> str:
    return ended_run(seeds)


def rows_of(seeds: Seeds, run: str) -> dict[str, int]:
    found = {}
    with closing(sqlite3.connect(seeds.store.database.path)) as raw:
        for (table,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = {row[1] for row in raw.execute(f"PRAGMA table_info({table})")} & {"run", "test"}
            columns |= {"name"} if table == "runs" else set()
            for column in columns:
                number = raw.execute(f"SELECT count(*) FROM {table} WHERE {column} = ?", (run,)).fetchone()[0]
                found |= {f"{table}.{column}": number} if number else {}
    return found


def test_rm_deletes_folder_rows_and_restore_tests_of_that_run_only(orch: Type, seeds: Seeds) -> None:
    run, other = ended_run(seeds), ended_run(seeds)
    seeds.killed_rank(run)
    seeds.store.set_cursor(run, "attempts/001/events/a.jsonl", 9, epoch=seeds.epoch)
    seeds.store.add_submission(run, 1, epoch=seeds.epoch, now=1.0)
    seeds.store.add_user_request(run, "release", {"node": "n1"}, 1.0)
    notice = Notice(run=run, attempt=1, source="a", seq=1, kind="incident", generation=1, time=1.0)
    seeds.store.put_notice(notice, epoch=seeds.epoch)
    test = ended_run(seeds, run=seeds.restore_test(run, 50, "RESTORED"))
    kept = rows_of(seeds, other)
    size = sum(path.stat().st_size for path in (seeds.root / run).rglob("*") if path.is_file())
    size += sum(path.stat().st_size for path in (seeds.root / test).rglob("*") if path.is_file())
    done = orch("rm", run, "-y", "--json")
    assert done.code == 0, done.err
    assert done.data == [{
        "run": run, "state": "SUCCEEDED", "removed": True, "folder": str(seeds.root / run), "bytes": size,
        "copies": [], "restore_tests": [test], "left": [],
    }]  # fmt: skip
    assert os.listdir(seeds.root) == [other]
    assert (rows_of(seeds, run), rows_of(seeds, test)) == ({}, {})
    assert rows_of(seeds, other) == kept
    assert orch("rm", run, "-y").code == 3
    assert orch("rm", other, "-y").out.startswith(f"{other}: removed, ")


def test_a_dry_run_removes_nothing(orch: Type, seeds: Seeds, run: str) -> None:
    before = rows_of(seeds, run)
    shown = orch("rm", run, "--dry-run")
    assert f"  folder  {seeds.root / run}" in shown.out
    assert "nothing was removed" in shown.err
    assert (rows_of(seeds, run), (seeds.root / run / "run.json").exists()) == (before, True)


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.CREATED, RunState.HELD])
def test_a_run_that_may_be_live_is_refused(orch: Type, seeds: Seeds, state: RunState) -> None:
    run = seeds.run(state=state)
    refused = orch("rm", run, "-y")
    assert refused.code == 4
    assert f"`orch cancel {run}` stops it; then try again" in refused.err
    assert seeds.store.run(run).removal == ""


def test_a_run_with_a_restore_test_under_way_is_refused(orch: Type, seeds: Seeds, run: str) -> None:
    test = seeds.restore_test(run, 50)
    refused = orch("rm", run, "-y")
    assert (refused.code, f"a restore test of {run} is under way: {test}" in refused.err) == (4, True)
    assert (seeds.root / run / "run.json").exists()


def test_a_run_that_another_registry_continues_keeps_its_folder(orch: Type, seeds: Seeds, run: str) -> None:
    other = seeds.root.parent / "other" / "registry.db"
    record_newer_attempt(seeds.store, run, other)
    refused = orch("rm", run, "-y")
    assert refused.code == 4
    assert f"another registry has continued {run}: {other} has attempt 2" in refused.err
    assert f"`orch db rebuild --root {seeds.root}` imports that" in refused.err
    assert (seeds.store.run(run).removal, (seeds.root / run / "run.json").exists()) == ("", True)
    assert orch("rm", run, "-y", "--forget").code == 0
    assert (rows_of(seeds, run), (seeds.root / run / "checkpoints" / NAME).is_dir()) == ({}, True)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_run_with_a_missing_or_damaged_record_is_removed(
    orch: Type, seeds: Seeds, run: str, content: str | None
) -> None:
    record = seeds.root / run / "record.json"
    record.unlink(missing_ok=True)
    if content is not None:
        record.write_text(content)
    assert orch("rm", run, "-y").code == 0
    assert os.listdir(seeds.root) == []


def test_a_pinned_checkpoint_keeps_its_run_until_it_is_unpinned(orch: Type, seeds: Seeds, run: str) -> None:
    storage = LocalStorage(seeds.root / run / "checkpoints")
    garbage.pin(storage, f"step-00000007.001-{NONCE}", "long gone", 1.0)
    assert orch("ckpt", "pin", f"{run}@50").code == 0
    refused = orch("rm", run, "-y")
    assert (refused.code, f"{run} has pinned checkpoints: step 50" in refused.err) == (4, True)
    hint = f"orch ckpt unpin {run}@50"
    assert hint in refused.err
    assert orch(*hint.split()[1:]).code == 0
    assert orch("rm", run, "-y").code == 0


def test_names_must_be_whole_and_the_other_runs_are_removed(orch: Type, seeds: Seeds, run: str) -> None:
    live = seeds.run()
    assert orch("rm", run[:-1], "-y").code == 3
    assert orch("rm", "@last", "-y").code == 3
    some = orch("rm", live, run, "nobody-1", "-y")
    assert some.code == 4
    assert f"orch cancel {live}" in some.err
    assert not (seeds.root / run).exists()


# -- folders that are not the run's own


def foreign(seeds: Seeds, run: str, how: str) -> None:
    folder = seeds.root / run
    if how == "nonce":
        (folder / "run.json").write_text(dump_line({"name": run, "nonce": "ffffffff"}))
    elif how == "no run.json":
        (folder / "run.json").unlink()
    elif how == "link":
        folder.rename(seeds.root / "elsewhere")
        folder.symlink_to(seeds.root / "elsewhere")
    elif how == "aside is a link":
        (seeds.root / "elsewhere").mkdir()
        (seeds.root / f".{run}.{NONCE}.removed").symlink_to(seeds.root / "elsewhere")
    elif how == "file":
        folder.rename(seeds.root / "elsewhere")
        folder.write_text("")
    else:
        folder.rename(seeds.root / "elsewhere")


@pytest.mark.parametrize("how", ["nonce", "no run.json", "link", "aside is a link", "file", "not there"])
def test_foreign_folder_is_left_alone(orch: Type, seeds: Seeds, run: str, how: str) -> None:
    foreign(seeds, run, how)
    before = sorted(path for path in seeds.root.rglob("*"))
    refused = orch("rm", run, "-y")
    assert refused.code == 4
    assert (sorted(path for path in seeds.root.rglob("*")), seeds.store.run(run).removal) == (before, "")
    hint = f"orch rm {run} --forget"
    assert hint in refused.err
    assert orch(*hint.split()[1:], "-y").code == 0
    assert (sorted(path for path in seeds.root.rglob("*")), rows_of(seeds, run)) == (before, {})


def test_a_folder_of_another_user_is_left_alone(
    orch: Type, seeds: Seeds, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused = orch("rm", run, "-y")
    assert (refused.code, "belongs to another user" in refused.err) == (4, True)


def test_an_unreadable_folder_is_not_reported_as_foreign(seeds: Seeds) -> None:
    run, first = seeds.store.create_run(seeds.new("tiny"), now=1.0, nonce=NONCE)
    with folder_of_an_ordinary_user() as above:
        mine = replace(run, run_dir=str(above / run.name))
        (above / run.name).mkdir(mode=0o000)
        with pytest.raises(Precondition, match=f"the folder of {run.name} cannot be read: Permission denied") as caught:
            rm.own_folder(mine, first, submitted=True)
        assert caught.value.hint == f"chmod u+rwx {above / run.name}, then run the same command again"
        above.chmod(0o000)
        with pytest.raises(Precondition, match="Permission denied") as caught:
            rm.own_folder(mine, first, submitted=True)
        assert caught.value.hint.startswith("make sure that you may enter the folders above it")


def test_links_are_deleted_without_their_targets(orch: Type, seeds: Seeds, run: str) -> None:
    outside = seeds.root / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "file").write_text("mine")
    for place in (seeds.root / run / "link", seeds.root / run / "checkpoints" / "link"):
        place.symlink_to(outside)
    assert orch("rm", run, "-y").code == 0
    assert (outside / "deep" / "file").read_text() == "mine"


def test_a_run_without_a_folder_is_removed(orch: Type, seeds: Seeds) -> None:
    run, _ = seeds.store.create_run(seeds.new("tiny"), now=1.0, nonce=NONCE)
    stamp = {"epoch": seeds.epoch, "now": 2.0}
    seeds.store.move_attempt(run.name, 1, AttemptState.ENDED, "cancelled", **stamp)
    seeds.store.move_run(run.name, RunState.CANCELLED, "cancelled", **stamp)
    assert orch("rm", run.name, "-y").out == f"{run.name}: removed, 0 B freed\n"


# -- further tiers


@pytest.fixture
def tier(seeds: Seeds, run: str, tmp_path: Path) -> Path:
    folder = tmp_path / "far" / run
    folder.mkdir(parents=True)
    make(LocalStorage(folder), 50, nonce=NONCE, now=time.time())
    tiers = [{"path": "run"}, {"path": str(tmp_path / "far")}]
    (seeds.root / run / "config.json").write_text(dump_line({"checkpoint": {"tiers": tiers}}))
    return folder


def test_copies_are_deleted_too(orch: Type, seeds: Seeds, run: str, tier: Path) -> None:
    (done,) = orch("rm", run, "-y", "--json").data
    (copies,) = done["copies"]
    assert (copies["tier"], copies["checkpoints"]) == (str(tier), [NAME])
    assert copies["bytes"] > 0
    assert not tier.exists()
    assert tier.parent.exists()


def test_copies_of_another_run_stay(orch: Type, seeds: Seeds, run: str, tier: Path, tmp_path: Path) -> None:
    make(LocalStorage(tier), 60, nonce="eeeeeeee", now=time.time())
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    (tier / f"step-00000070.001-{NONCE}").symlink_to(tmp_path / "victim")
    done = orch("rm", run, "-y")
    assert f"left  {tier}: 2 checkpoints of another run" in done.err
    assert sorted(os.listdir(tier)) == ["step-00000060.001-eeeeeeee", f"step-00000070.001-{NONCE}"]
    assert (tmp_path / "victim" / "file").read_text() == "mine"


def test_copies_can_be_kept(orch: Type, seeds: Seeds, run: str, tier: Path) -> None:
    done = orch("rm", run, "-y", "--keep-copies", "--json")
    assert done.data[0]["left"] == [f"{tier}: 1 checkpoints (--keep-copies)"]
    assert os.listdir(tier) == [NAME]
    assert not (seeds.root / run).exists()


def test_an_unreachable_tier_is_named(orch: Type, seeds: Seeds, run: str) -> None:
    tiers = [{"path": "run"}, {"path": "nowhere://bucket/ckpt"}]
    (seeds.root / run / "config.json").write_text(dump_line({"checkpoint": {"tiers": tiers}}))
    done = orch("rm", run, "-y")
    assert (done.code, "left  nowhere://bucket/ckpt" in done.err) == (0, True)


# -- asking


def typed_at_a_terminal(seeds: Seeds, answer: str, *words: str) -> tuple[int, str]:
    person, machine = pty.openpty()
    process = ForkedOrch(seeds.store, words, stdin=machine, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    os.write(person, answer.encode())
    said, _ = process.communicate(timeout=60)
    os.close(person)
    os.close(machine)
    return process.returncode, said


def test_rm_asks_for_confirmation_at_a_terminal(seeds: Seeds, run: str) -> None:
    code, said = typed_at_a_terminal(seeds, "n\n", "rm", run)
    assert (code, "Remove permanently? [y/N]" in said, "nothing was removed" in said) == (0, True, True)
    assert f"folder  {seeds.root / run}" in said
    assert (seeds.root / run / "run.json").exists()
    code, said = typed_at_a_terminal(seeds, "y\n", "rm", run)
    assert (code, f"{run}: removed" in said) == (0, True)
    assert rows_of(seeds, run) == {}


def test_without_a_terminal_rm_needs_yes(orch: Type, seeds: Seeds, run: str) -> None:
    refused = orch("rm", run)
    assert refused.code == 2
    assert refused.err.splitlines() == [
        "error: the removal cannot be confirmed", "  stdin is not a terminal", f"  orch rm {run} -y",
    ]  # fmt: skip
    assert f"orch rm {run} --keep-copies --forget -y" in orch("rm", run, "--forget", "--keep-copies").err
    assert (seeds.root / run / "run.json").exists()


# -- kills and concurrent commands


@pytest.mark.parametrize("point", failpoints.REMOVAL_POINTS)
def test_the_same_command_finishes_after_a_kill(orch: Type, seeds: Seeds, run: str, tier: Path, point: str) -> None:
    killed = ForkedOrch(seeds.store, ["rm", run, "-y"], more={failpoints.VARIABLE: point})
    assert killed.wait(60) == -signal.SIGKILL
    assert "is being removed" in orch("status", run).out
    refused = orch("resume", run, "train.steps=500")
    assert (refused.code, f"`orch rm {run} -y` finishes the removal" in refused.err) == (4, True)
    done = orch("rm", run, "-y")
    assert done.code == 0, done.err
    assert (os.listdir(seeds.root), rows_of(seeds, run), tier.exists()) == ([], {}, False)


def test_a_folder_that_cannot_be_deleted_is_reported_and_finished_later(
    orch: Type, seeds: Seeds, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", fails)
        stuck = orch("rm", run, "-y", "--json")
    assert (stuck.code, stuck.data[0]["removed"]) == (4, False)
    (warning,) = stuck.answer["warnings"]
    assert "Permission denied; run the same command again to finish" in warning["message"]
    assert seeds.store.run(run).removal == Removal.SET_ASIDE
    assert orch("rm", run, "-y").code == 0
    assert (os.listdir(seeds.root), rows_of(seeds, run)) == ([], {})


def test_a_run_being_removed_is_neither_resumed_nor_tested(seeds: Seeds, run: str) -> None:
    seeds.store.begin_removal(run)
    request = seeds.store.add_user_request(run, "resume", {}, 1.0)
    clock = Clock()
    actor = Actor(seeds.store, {}, clock, ObservedSince(clock.mono))
    lease = seeds.store.lease()
    assert lease is not None
    actor.start_pass(lease)
    answer_idle(actor)
    (answered,) = [one for one in seeds.store.user_requests(pending=False) if one.id == request]
    assert answered.answer == f"refused: {run} is being removed"
    assert seeds.store.run(run).state is RunState.SUCCEEDED
    with pytest.raises(Precondition, match="is being removed"):
        seeds.restore_test(run, 50)


def test_no_resume_is_offered_for_a_held_run_being_removed(orch: Type, seeds: Seeds) -> None:
    run = ended_run(seeds, RunState.HELD)
    seeds.store.begin_removal(run)
    shown = orch().out
    assert f"orch rm {run}" in shown
    assert "orch resume" not in shown


def test_a_run_resumed_meanwhile_is_not_removed(seeds: Seeds, run: str) -> None:
    seeds.store.move_run(run, RunState.RECOVERING, "resumed", epoch=seeds.epoch, now=time.time())
    with pytest.raises(Precondition, match="is RECOVERING"):
        seeds.store.begin_removal(run)
    assert json.loads((seeds.root / run / "run.json").read_text())["name"] == run


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_run_with_another_runs_folder_inside_is_kept(orch: Type, seeds: Seeds, run: str, is_registered: bool) -> None:
    inner = ended_run(seeds)
    place = seeds.root / run / "finetune" / inner
    place.parent.mkdir()
    (seeds.root / inner).rename(place)
    if not is_registered:  # of another home or user
        seeds.store.begin_removal(inner)
        seeds.store.delete_run(inner)
    said = orch("rm", run, "-y")
    assert said.code == 4
    assert f"the folder of {inner} is inside that of {run}" in said.err
    assert str(place) in said.err
    assert (place / "run.json").exists()
    assert seeds.store.run(run).removal == Removal.NONE


def test_a_copy_of_a_run_in_the_code_is_deleted_with_it(orch: Type, seeds: Seeds, run: str) -> None:
    copied = seeds.root / run / "code" / "runs" / "old-1"
    copied.mkdir(parents=True)
    (copied / "run.json").write_text(dump_line({"name": "old-1", "nonce": NONCE}))
    assert orch("rm", run, "-y").code == 0
    assert not (seeds.root / run).exists()


def after_another(do: Callable[..., Any]) -> Callable[..., Any]:
    def twice(*given: Any) -> Any:
        do(*given)
        return do(*given)

    return twice


def test_rows_that_another_command_deleted(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended_run(seeds)
    monkeypatch.setattr(rm, "remove", after_another(rm.remove))
    said = orch("rm", run, "-y")
    assert (said.code, f"{run}: another command has just removed it" in said.err) == (0, True)
