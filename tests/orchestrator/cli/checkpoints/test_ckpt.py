"""`orch ckpt`: what a target means, tiers, pins, room, debris."""

import os
import shutil
import time
from pathlib import Path

import pytest

from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import dump_line
from orchestrator.registry.records import Checkpoint
from orchestrator.states import AttemptState, RunState, Trust
from tests.checkpointing.made_checkpoint import make
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.registry.newer_record import record_newer_attempt

NONCE = "0123abcd"


@pytest.fixture
def run(seeds: Seeds) -> str:
    name = seeds.run()
    root = folder(seeds, name)
    root.mkdir(parents=True)
    for step in (50, 100):
        make(LocalStorage(root), step, nonce=NONCE, now=time.time())
    return name


def folder(seeds: Seeds, run: str) -> Path:
    return seeds.root / run / "checkpoints"


def half_written(root: Path, step: int, attempt: int = 1, nonce: str = NONCE) -> Path:
    place = root / f"step-{step:08d}.{attempt:03d}-{nonce}"
    place.mkdir()
    (place / "__0_0.distcp").write_bytes(b"x" * 100)
    return place


def end(seeds: Seeds, run: str) -> None:
    now = time.time()
    seeds.store.move_attempt(run, 1, AttemptState.ENDED, "over", epoch=seeds.epoch, now=now)
    seeds.store.move_run(run, RunState.FAILED, "a bug", epoch=seeds.epoch, now=now)


# -- what a target means


def test_checkpoint_by_folder(orch: Type, seeds: Seeds, run: str) -> None:
    place = folder(seeds, run) / f"step-00000050.001-{NONCE}"
    (row,) = orch("ckpt", "verify", place, "--json").data
    assert (row["step"], row["ok"], row["path"]) == (50, True, str(place))
    (same,) = orch("ckpt", "verify", f"file://{place}", "--json").data
    assert same["path"] == str(place)
    (by_name,) = orch("ckpt", "verify", f"{run}@{place.name}", "--json").data
    assert by_name["name"] == place.name


def test_a_folder_that_is_none_is_told_apart(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    missing = orch("ckpt", "verify", tmp_path / "nothing")
    assert missing.code == 3
    assert "RUN@500" in missing.err
    other = orch("ckpt", "verify", folder(seeds, run))
    assert other.code == 2
    assert "not the name of a checkpoint" in other.err


@pytest.mark.parametrize(
    "words", [("ckpt", "verify"), ("ckpt", "diff", "x"), ("submit", "--from"), ("ckpt", "restore-test")]
)
def test_empty_step_is_refused(orch: Type, run: str, words: tuple[str, ...]) -> None:
    refused = orch(*words[:2], f"{run}@", *([f"{run}@50"] if words[2:] else []))
    assert refused.code == 2
    assert f"no step is given after the @\n  {run}@\n  {run}@latest is the newest" in refused.err
    assert orch("ckpt", "verify", "@last@").code == 2
    assert orch("ckpt", "verify", f"{run}@latest").code == orch("ckpt", "verify", run).code == 0


def test_verify_names_a_half_written_folder_invalid(orch: Type, seeds: Seeds, run: str) -> None:
    bad = orch("ckpt", "verify", half_written(folder(seeds, run), 150), "--json")
    assert bad.code == 7
    assert bad.data[0]["faults"][0]["file"] == "COMMIT"


# -- tiers


def test_copies_on_other_tiers_are_listed_and_verified_on_request(
    orch: Type, seeds: Seeds, run: str, tmp_path: Path
) -> None:
    second = tmp_path / "slow" / run
    second.mkdir(parents=True)
    make(LocalStorage(second), 50, nonce=NONCE)
    make(LocalStorage(second), 20, nonce=NONCE)
    seeds.tiers(run, {"path": "run"}, {"path": str(tmp_path / "slow")})
    rows = {row["step"]: row["tiers"] for row in orch("ckpt", "ls", run, "--json").data}
    assert rows == {100: ["run"], 50: ["run", str(tmp_path / "slow")], 20: [str(tmp_path / "slow")]}
    assert [row["tier"] for row in orch("ckpt", "verify", f"{run}@50", "--json").data] == ["run"]
    both = orch("ckpt", "verify", f"{run}@50", "--copies", "--json").data
    assert [row["tier"] for row in both] == ["run", str(tmp_path / "slow")]
    assert [row["step"] for row in orch("ckpt", "verify", f"{run}@all", "--json").data] == [100, 50, 20]
    (only,) = orch("ckpt", "verify", f"{run}@20", "--json").data
    assert only["path"] == str(second / f"step-00000020.001-{NONCE}")


def test_visible_disks_of_nodes(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    for node in ("n1", "n2"):
        (tmp_path / "nvme" / run / node).mkdir(parents=True)
        make(LocalStorage(tmp_path / "nvme" / run / node), 120, nonce=NONCE)
    seeds.tiers(run, {"path": str(tmp_path / "nvme"), "shared": False}, {"path": "run"})
    rows = {row["step"]: row["tiers"] for row in orch("ckpt", "ls", run, "--json").data}
    assert rows[120] == [f"{tmp_path / 'nvme'} ({node})" for node in ("n1", "n2")]


# -- pins


def test_a_pin_is_shown_and_taken_back(orch: Type, run: str) -> None:
    assert orch("ckpt", "pin", f"{run}@50", "--note", "the good one").code == 0
    rows = {row["step"]: (row["pinned"], row["pin"]) for row in orch("ckpt", "ls", run, "--json").data}
    assert rows == {50: (True, "the good one"), 100: (False, None)}
    assert "the good one" in orch("ckpt", "ls", run).out
    assert orch("ckpt", "unpin", f"{run}@50").code == 0
    assert not any(row["pinned"] for row in orch("ckpt", "ls", run, "--json").data)
    again = orch("ckpt", "unpin", f"{run}@50")
    assert again.code == 3
    assert "not pinned" in again.err


def test_only_what_is_there_is_pinned(orch: Type, run: str) -> None:
    assert orch("ckpt", "pin", f"{run}@77").code == 3
    assert orch("ckpt", "unpin", run).code == 2


def test_unpin_deleted_checkpoint(orch: Type, seeds: Seeds, run: str) -> None:
    orch("ckpt", "pin", f"{run}@50")
    place = folder(seeds, run) / f"step-00000050.001-{NONCE}"
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    assert orch("ckpt", "unpin", f"{run}@50", "--json").data == [{"name": place.name, "pinned": False}]


# -- room and debris


def test_gc_deletes_debris_of_ended_attempts(orch: Type, seeds: Seeds, run: str) -> None:
    root = folder(seeds, run)
    mine, foreign = half_written(root, 150), half_written(root, 160, attempt=7, nonce="ffff0000")
    (root / "notes").mkdir()
    live = orch("ckpt", "gc", run, "--json").data
    assert [(row["done"], row["reason"]) for row in live if row["name"] == mine.name] == [
        ("left", "attempt 1 has not ended")
    ]
    assert mine.exists()
    end(seeds, run)
    dry = {row["name"]: row["done"] for row in orch("ckpt", "gc", run, "--dry-run", "--json").data}
    assert dry == {mine.name: "would be deleted", foreign.name: "left"}
    assert mine.exists()
    done = {row["name"]: row["done"] for row in orch("ckpt", "gc", "--all", "--json").data}
    assert done == {mine.name: "deleted", foreign.name: "left"}
    assert sorted(os.listdir(root)) == sorted(
        [f"step-00000050.001-{NONCE}", f"step-00000100.001-{NONCE}", foreign.name, "notes"]
    )


def test_gc_leaves_deletions_to_a_live_attempt(orch: Type, seeds: Seeds, run: str) -> None:
    place = half_written(folder(seeds, run), 150)
    (place / "DELETED").write_bytes(b"")
    (row,) = orch("ckpt", "gc", run, "--json").data
    assert (row["done"], row["what"]) == ("left", "half-deleted")


def corrupt(seeds: Seeds, run: str, step: int) -> Path:
    seeds.checkpoint(run, step, Trust.COMMITTED)
    name = f"step-{step:08d}.001-{NONCE}"
    seeds.store.trust(run, name, Trust.CORRUPT, "digest differs", epoch=seeds.epoch, now=time.time())
    return folder(seeds, run) / name


def test_refused_checkpoints_stay_as_evidence_unless_asked_for(orch: Type, seeds: Seeds, run: str) -> None:
    place = corrupt(seeds, run, 50)
    (place / "__0_0.distcp").write_bytes(b"z" * 1000)
    assert orch("ckpt", "gc", run, "--json").data[0]["reason"] == "an attempt of the run has not ended"
    end(seeds, run)
    named = orch("ckpt", "gc", run, "--json").data[0]
    assert (named["done"], named["what"]) == ("left", "refused")
    assert "digest differs" in named["reason"]
    seeds.drop_lease()
    orch("ckpt", "pin", f"{run}@50")
    assert orch("ckpt", "gc", run, "--refused", "--json").data[0]["reason"] == "it is pinned"
    orch("ckpt", "unpin", f"{run}@50")
    assert orch("ckpt", "gc", run, "--refused", "--json").data[0]["done"] == "deleted"
    assert not place.exists()
    assert {row.name: row.trust for row in seeds.store.checkpoints(run)} == {place.name: Trust.DELETED}
    held = seeds.store.lease()
    assert held is not None
    assert held.holder == ""


def test_a_refused_checkpoint_that_verifies_stays(orch: Type, seeds: Seeds, run: str) -> None:
    place = corrupt(seeds, run, 50)
    end(seeds, run)
    seeds.drop_lease()
    (row,) = orch("ckpt", "gc", run, "--refused", "--json").data
    assert (row["done"], row["reason"]) == ("left", "its bytes are intact")
    assert place.exists()


def test_refused_checkpoints_stay_with_another_registry(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    place = corrupt(seeds, run, 50)
    (place / "__0_0.distcp").write_bytes(b"z" * 1000)
    end(seeds, run)
    seeds.drop_lease()
    record_newer_attempt(seeds.store, run, tmp_path / "other.db")
    (row,) = orch("ckpt", "gc", run, "--refused", "--json").data
    assert (row["done"], place.exists()) == ("left", True)
    assert row["reason"].startswith(f"another registry has continued {run}: ")


def test_committed_checkpoints_are_not_deleted_beside_a_controller(orch: Type, seeds: Seeds, run: str) -> None:
    place = corrupt(seeds, run, 50)
    (place / "__0_0.distcp").write_bytes(b"z" * 1000)
    end(seeds, run)
    refused = orch("ckpt", "gc", run, "--refused")
    assert refused.code == 4
    assert "orch controller stop" in refused.err
    assert place.exists()


def test_unknown_run_with_live_controller(orch: Type, seeds: Seeds, run: str) -> None:
    assert orch("ckpt", "gc", "nobody", "--refused").code == 3


def test_line_breaks_in_arguments(orch: Type, run: str) -> None:
    assert orch("ckpt", "pin", f"{run}@50", "--note", "good\nerror: bad").out.endswith("(good error: bad)\n")
    assert "error: no run no such\n" in orch("show", "no\nsuch").err


def test_du_tells_trust_debris_and_what_gc_frees(orch: Type, seeds: Seeds, run: str) -> None:
    root = folder(seeds, run)
    seeds.checkpoint(run, 100, Trust.VERIFIED)
    half_written(root, 150)
    end(seeds, run)
    rows = {row["trust"]: row for row in orch("ckpt", "du", "--json").data}
    assert {kind: row["count"] for kind, row in rows.items()} == {"VERIFIED": 1, "COMMITTED": 1, "debris": 1}
    assert (rows["debris"]["bytes"], rows["debris"]["collectable"]) == (100, 100)
    assert rows["VERIFIED"]["bytes"] > 1500
    assert rows["VERIFIED"]["collectable"] == 0
    assert "orch ckpt gc --all" in orch("ckpt", "du", run).err


def test_removed_checkpoints_are_listed_as_gone(orch: Type, seeds: Seeds, run: str) -> None:
    for step in (50, 100):
        seeds.checkpoint(run, step)
    shutil.rmtree(folder(seeds, run) / f"step-00000050.001-{NONCE}")
    said = orch("ckpt", "ls", run, "--json").answer
    assert [row["reason"] for row in said["data"]] == ["", "gone: no tier has it"]
    assert [one["code"] for one in said["warnings"]] == ["checkpoints_gone"]
    said_in_words = " ".join(orch("ckpt", "ls", run).err.split())
    assert "no tier still has these checkpoints of tiny-1: 50; a resume goes back to step 100" in said_in_words
    seeds.tiers(run, {"path": "/nvme/orch", "shared": False}, {"path": "run"})
    assert not orch("ckpt", "ls", run, "--json").answer["warnings"]  # it may be on a node that is not this machine


def test_resume_without_checkpoints_is_not_promised(orch: Type, seeds: Seeds, run: str) -> None:
    seeds.checkpoint(run, 50)
    shutil.rmtree(folder(seeds, run))
    folder(seeds, run).mkdir()
    said = " ".join(orch("ckpt", "ls", run).err.split())
    assert ": 50; none is left: a resume fails as `storage` until one of them is put back" in said


def test_checkpoints_of_a_command(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    (seeds.root / run / "config.json").write_text(dump_line({"command": ["python", "train.py"]}))
    shutil.rmtree(folder(seeds, run))
    folder(seeds, run).mkdir()
    for step in (5, 6):
        path = tmp_path / "out" / f"checkpoint_{step}"
        path.mkdir(parents=True)
        seeds.store.put_checkpoint(
            Checkpoint(
                run=run, name=f"checkpoint_{step}.1f", step=step, attempt=1, trust=Trust.COMMITTED, bytes=9,
                committed_at=1.0, path=str(path), tier=str(path.parent),
            ),
            epoch=seeds.epoch,
        )  # fmt: skip
    said = orch("ckpt", "ls", run, "--json").answer
    assert [(row["step"], row["reason"], row["tiers"]) for row in said["data"]] == [
        (6, "", [str(tmp_path / "out")]), (5, "", [str(tmp_path / "out")]),
    ]  # fmt: skip
    assert not said["warnings"]
    (tmp_path / "out" / "checkpoint_6").rmdir()
    said = orch("ckpt", "ls", run, "--json").answer
    assert said["data"][0]["reason"] == f"gone: there is no {tmp_path}/out/checkpoint_6"
    (warning,) = said["warnings"]
    assert warning["message"] == f"the command's folder no longer has these checkpoints of {run}: 6"


def test_status_warns_of_missing_checkpoint(orch: Type, seeds: Seeds, run: str) -> None:
    def warned() -> list[str]:
        return [one["code"] for one in orch("status", run, "--json").answer["warnings"] if "check" in one["code"]]

    seeds.checkpoint(run, 50)
    name = f"step-00000050.001-{NONCE}"
    assert (folder(seeds, run) / name).is_dir()
    assert warned() == []
    shutil.rmtree(folder(seeds, run) / name)
    assert warned() == ["checkpoint_gone"]
    assert f"the folder of step 50 of {run} is gone; `orch ckpt ls {run}`" in " ".join(orch("status", run).err.split())
    (folder(seeds, run) / name).symlink_to(name)  # what a folder without permission is to an ordinary user
    assert warned() == []
    shutil.rmtree(folder(seeds, run))
    assert warned() == []  # what cannot be seen is not gone


def test_missing_run_folder_is_warned_of_once(orch: Type, seeds: Seeds, run: str) -> None:
    seeds.checkpoint(run, 50)
    shutil.rmtree(seeds.root / run)
    said = orch("ckpt", "ls", run, "--json").answer
    assert [one["code"] for one in said["warnings"]] == ["folder_missing"]
    assert [row["reason"] for row in said["data"]] == [""]


@pytest.mark.parametrize("verb", ["ls", "du", "verify"])
def test_file_system_errors_as_text(orch: Type, seeds: Seeds, run: str, verb: str) -> None:
    shutil.rmtree(folder(seeds, run))
    folder(seeds, run).symlink_to(folder(seeds, run))
    said = orch("ckpt", verb, run)
    assert "Too many levels of symbolic links: /" in " ".join(said.err.split()), said.err
    assert "Errno" not in said.err
