"""`orch ckpt` with several tiers: what is being copied, what cannot be reached, and what only nodes have."""

import errno
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from checkpointing.retention import garbage
from checkpointing.storage.backends import FsspecStorage, LocalStorage, Storage, open_storage
from checkpointing.storage.durable import dump_line
from checkpointing.tiers import tier
from checkpointing.verification.verdicts import CopyVerdict, read_manifest_digest, record
from orchestrator.cli.main import redact_command_line
from orchestrator.errors import NotFound
from orchestrator.states import AttemptState, RunState, Trust
from tests.checkpointing.made_checkpoint import make
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.registry.newer_record import record_newer_attempt

NONCE = "0123abcd"
NAME = f"step-00000050.001-{NONCE}"


@pytest.fixture
def run(seeds: Seeds) -> str:
    name = seeds.run()
    folder(seeds, name).mkdir(parents=True)
    make(LocalStorage(folder(seeds, name)), 50, nonce=NONCE, now=time.time())
    return name


def folder(seeds: Seeds, run: str) -> Path:
    return seeds.root / run / "checkpoints"


def half_written(root: Path, name: str = NAME) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "__0_0.distcp").write_bytes(b"x" * 100)
    return root / name


def over(seeds: Seeds, run: str, state: AttemptState = AttemptState.ENDED) -> None:
    number = seeds.store.attempts(run)[-1].number
    seeds.store.move_attempt(run, number, state, "over", epoch=seeds.epoch, now=time.time())


def next_attempt(seeds: Seeds, run: str) -> None:
    seeds.store.add_attempt(run, nonce="89ab4567", excluded=(), epoch=seeds.epoch, now=time.time())


def left(orch: Type, run: str, *words: str) -> dict[str, tuple[str, str]]:
    rows = orch("ckpt", "gc", run, "--json", *words).data
    return {row["tier"]: (row["done"], row["reason"]) for row in rows}


# -- another run with the same name in the same tier


@pytest.fixture
def other(seeds: Seeds, run: str, tmp_path: Path) -> Path:
    tier = tmp_path / "scratch"
    config = {"tiers": [{"path": str(tier)}, {"path": "run"}], "best": {"metric": "loss"}}
    (seeds.root / run / "config.json").write_text(dump_line({"checkpoint": config}))
    (tier / run).mkdir(parents=True)
    make(LocalStorage(tier / run), 50, nonce=NONCE, now=time.time(), extra={"loss": 3.0})
    for step in (50, 80):
        make(LocalStorage(tier / run), step, nonce="feedface", now=time.time(), extra={"loss": 1.0})
    return tier / run


@pytest.mark.parametrize("words", ["{}", "{}@50", "{}@best", "{}@latest", "{}@all"])
def test_targets_never_select_another_run(orch: Type, run: str, other: Path, words: str) -> None:
    done = orch("ckpt", "verify", words.format(run), "--json")
    assert (done.code, {Path(row["path"]).name for row in done.data}) == (0, {NAME}), done.err


@pytest.mark.parametrize(
    "words",
    [
        ("ckpt", "export", "{}@80", "out"),
        ("ckpt", "pin", "{}@80"),
        ("ckpt", "verify", "{}@80"),
        ("ckpt", "restore-test", "{}@80", "--no-controller"),
        ("submit", "--from", "{}@80", "--no-controller"),
    ],
)
def test_step_of_another_run_is_not_found(orch: Type, run: str, other: Path, words: tuple[str, ...]) -> None:
    done = orch(*(word.format(run) for word in words), "--json")
    assert done.code == NotFound.exit_code
    assert f"{run} has no checkpoint of step 80" in done.err + done.out
    assert "available steps: 50" in done.err + done.out


def test_ls_and_du_leave_out_another_run_with_the_name(orch: Type, seeds: Seeds, run: str, other: Path) -> None:
    assert [row["name"] for row in orch("ckpt", "ls", run, "--json").data] == [NAME]
    told = orch("ckpt", "ls", run)
    assert f"{other.parent}: checkpoints of another run named {run} are left out (2)" in told.err + told.out
    assert {row["count"] for row in orch("ckpt", "du", run, "--json").data} == {1}


def test_gc_keeps_refused_checkpoints_of_another_run(orch: Type, seeds: Seeds, run: str, other: Path) -> None:
    found = CopyVerdict(
        name="step-00000080.001-feedface", place=str(other), ok=False, level=2, at=time.time(), reason="torn",
        manifest=read_manifest_digest(LocalStorage(other), "step-00000080.001-feedface"),
    )  # fmt: skip
    record(LocalStorage(folder(seeds, run)), found)
    over(seeds, run)
    seeds.drop_lease()
    orch("ckpt", "gc", run, "--refused")
    assert (other / "step-00000080.001-feedface" / "COMMIT").exists()


def test_initial_checkpoint_is_found_in_every_tier(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    begun = "step-00000030.002-89ab4567"
    new = replace(seeds.new("fork"), identity={"imported": {"checkpoint": f"/runs/tiny-1/checkpoints/{begun}"}})
    fork = seeds.store.create_run(new, now=time.time(), nonce=NONCE)[0].name
    folder(seeds, fork).mkdir(parents=True)
    seeds.tiers(fork, {"path": str(tmp_path / "scratch")}, {"path": "run"})
    for place in (folder(seeds, fork), tmp_path / "scratch" / fork):
        place.mkdir(parents=True, exist_ok=True)
        make(LocalStorage(place), 30, attempt=2, nonce="89ab4567", now=time.time())
    (row,) = orch("ckpt", "ls", fork, "--json").data
    assert (row["name"], row["tiers"]) == (begun, ["run", str(tmp_path / "scratch")])


# -- what is being copied


def test_gc_leaves_copies_of_a_live_attempt(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    seeds.tiers(run, {"path": "run"}, {"path": str(tmp_path / "slow")})
    copied = half_written(tmp_path / "slow" / run)
    debris = half_written(folder(seeds, run), f"step-00000070.001-{NONCE}")
    over(seeds, run)
    next_attempt(seeds, run)
    assert left(orch, run) == {
        "run": ("deleted", f"half-written by attempt 1 ({NONCE}), which has ended"),
        str(tmp_path / "slow"): ("left", "attempt 2 has not ended, and may be copying it"),
    }
    assert (copied.exists(), debris.exists()) == (True, False)
    over(seeds, run)
    assert left(orch, run)[str(tmp_path / "slow")][0] == "deleted"
    assert not copied.exists()


def test_gc_leaves_copies_of_another_registry(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    seeds.tiers(run, {"path": "run"}, {"path": str(tmp_path / "slow")})
    copied = half_written(tmp_path / "slow" / run)
    over(seeds, run)
    record_newer_attempt(seeds.store, run, tmp_path / "other.db")
    done, reason = left(orch, run)[str(tmp_path / "slow")]
    assert (done, copied.exists()) == ("left", True)
    assert reason.startswith(f"another registry has continued {run}: {tmp_path / 'other.db'} has attempt 2")


def test_run_folder_as_copy_target(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    seeds.tiers(run, {"path": str(tmp_path / "fast")}, {"path": "run"})
    half_written(folder(seeds, run), f"step-00000070.001-{NONCE}")
    half_written(tmp_path / "fast" / run, f"step-00000070.001-{NONCE}")
    over(seeds, run)
    next_attempt(seeds, run)
    assert {tier: done for tier, (done, _) in left(orch, run).items()} == {
        "run": "left", str(tmp_path / "fast"): "deleted",
    }  # fmt: skip


def test_gc_stops_when_an_attempt_begins_meanwhile(
    orch: Type, seeds: Seeds, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds.tiers(run, {"path": "run"}, {"path": str(tmp_path / "slow")})
    copied = half_written(tmp_path / "slow" / run)
    over(seeds, run)
    delete = garbage.delete

    def begun(storage: Storage, name: str, fence: Callable[[], bool]) -> bool:
        next_attempt(seeds, run)
        return delete(storage, name, fence)

    monkeypatch.setattr("orchestrator.cli.checkpoints.gc.delete", begun)
    done = orch("ckpt", "gc", run, "--json")
    assert (done.code, [row["done"] for row in done.data]) == (4, ["left"])
    assert (copied / "__0_0.distcp").exists()


def test_what_a_lost_attempt_left_is_nobody_s(orch: Type, seeds: Seeds, run: str) -> None:
    debris = half_written(folder(seeds, run), f"step-00000070.001-{NONCE}")
    over(seeds, run, AttemptState.LOST)
    assert left(orch, run)["run"][0] == "deleted"
    assert not debris.exists()


@pytest.mark.parametrize("end", ["the run is over", "a later attempt was allowed"])
def test_refused_checkpoints_of_a_lost_attempt(orch: Type, seeds: Seeds, run: str, end: str) -> None:
    seeds.checkpoint(run, 50, Trust.COMMITTED)
    seeds.store.trust(run, NAME, Trust.CORRUPT, "digest differs", epoch=seeds.epoch, now=time.time())
    over(seeds, run, AttemptState.LOST)
    assert left(orch, run)["run"] == ("left", "an attempt of the run has not ended")
    if end == "the run is over":
        seeds.store.move_run(run, RunState.FAILED, "a bug", epoch=seeds.epoch, now=time.time())
    else:
        next_attempt(seeds, run)
        over(seeds, run)
    assert left(orch, run)["run"] == ("left", "evidence, kept without --refused: digest differs")


# -- what cannot be reached


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(FsspecStorage, "list", _refuse)
    monkeypatch.setattr(FsspecStorage, "open", _refuse)
    return "memory://far"


def _refuse(_storage: FsspecStorage, _path: str) -> NoReturn:
    raise OSError(errno.EIO, "NoCredentialsError: unable to locate credentials")


def test_reachable_copy_is_used(orch: Type, seeds: Seeds, run: str, away: str) -> None:
    seeds.tiers(run, {"path": "run"}, {"path": away})
    good = orch("ckpt", "verify", f"{run}@50", "--json")
    assert (good.code, [row["tier"] for row in good.data]) == (0, ["run"])
    assert f"tier {away} cannot be read" in good.answer["warnings"][0]["message"]
    assert orch("ckpt", "pin", f"{run}@50").code == 0


def test_unreachable_tier_is_an_error_without_other_copies(orch: Type, seeds: Seeds, run: str, away: str) -> None:
    seeds.tiers(run, {"path": "run"}, {"path": away})
    shutil.rmtree(folder(seeds, run) / NAME)
    none = orch("ckpt", "verify", run)
    assert (none.code, "unable to locate credentials" in none.err) == (4, True)


def test_tier_with_missing_library(orch: Type, seeds: Seeds, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds.tiers(run, {"path": "s3://far"}, {"path": "run"})
    make_storage = open_storage

    def without_s3(place: str) -> Storage:
        if place.startswith("s3://"):
            raise ImportError("Install s3fs to access S3")
        return make_storage(place)

    monkeypatch.setattr(tier, "open_storage", without_s3)
    for verb in ("ls", "du", "gc"):
        done = orch("ckpt", verb, run)
        assert (done.code, "tier s3://far cannot be read" in done.err, "orch[s3]" in done.err) == (0, True, True), verb
        assert done.err.count("cannot be read") == 1, verb
    assert orch("ckpt", "verify", run).code == 0


def test_du_warns_once_of_what_it_cannot_read(orch: Type, seeds: Seeds, run: str, away: str) -> None:
    seeds.tiers(run, {"path": "run"}, {"path": away})
    assert orch("ckpt", "du", run).err.count("cannot be read") == 1


def test_unreachable_checkpoint_is_not_invalid(orch: Type, away: str) -> None:
    gone = orch("ckpt", "verify", f"{away}/{NAME}")
    assert (gone.code, "unable to locate credentials" in gone.err, "INVALID" in gone.out) == (4, True, False)


def test_missing_checkpoint_in_store_is_invalid(orch: Type) -> None:
    assert orch("ckpt", "verify", f"memory://nothing/{NAME}").code == 7


@pytest.mark.parametrize("place", ["s3://me:hush@bucket", "nosuch://bucket"])
def test_a_url_that_makes_no_sense_is_bad_input(orch: Type, home: Path, place: str) -> None:
    bad = orch("ckpt", "verify", f"{place}/{NAME}")
    assert (bad.code, "hush" in bad.err, "internal" in bad.err) == (2, False, False)
    assert not (home / "last-error.txt").exists()


def test_secrets_in_urls_are_not_kept() -> None:
    words = ["ckpt", "verify", "s3://me:hu/sh@bucket/x", "cluster.root=s3://a:b@c"]
    assert redact_command_line(words) == "ckpt verify s3://***@bucket/x cluster.root=s3://***@c"


# -- what only nodes have


@pytest.fixture
def nodes(seeds: Seeds, run: str, tmp_path: Path) -> tuple[Path, Path]:
    seeds.tiers(run, {"path": str(tmp_path / "nvme"), "shared": False}, {"path": "run"})
    parts = tmp_path / "nvme" / run / "n1", tmp_path / "nvme" / run / "n2"
    for number, part in enumerate(parts):
        part.mkdir(parents=True)
        name = make(LocalStorage(part), 60, nonce=NONCE)
        (part / name / f"__{1 - number}_0.distcp").unlink()
    return parts[0] / name, parts[1] / name


@pytest.mark.parametrize("level", [0, 2, 4])
def test_a_node_s_own_part_is_verified_as_such(orch: Type, run: str, nodes: tuple[Path, Path], level: int) -> None:
    done = orch("ckpt", "verify", run, "--copies", "--level", level, "--json")
    assert (done.code, [row["ok"] for row in done.data]) == (0, [True, True])
    assert [row["notes"][0] for row in done.data] == ["1 of 3 files are on other nodes: not checked"] * 2
    assert [row["level"] for row in done.data] == [min(level, 2)] * 2
    assert "1 of 3 files are on other nodes: not checked" in orch("ckpt", "verify", run).err
    (nodes[1] / "__1_0.distcp").write_bytes(b"y" * 499 + b"!")
    assert orch("ckpt", "verify", run, "--copies", "--level", level).code == (7 if level else 0)


def test_complete_copy_is_preferred(
    orch: Type, seeds: Seeds, run: str, nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    fast, slow = {"path": str(tmp_path / "nvme"), "shared": False}, {"path": str(tmp_path / "slow")}
    seeds.tiers(run, fast, {"path": "run"}, slow)
    (tmp_path / "slow" / run).mkdir(parents=True)
    make(LocalStorage(tmp_path / "slow" / run), 60, nonce=NONCE)
    (row,) = orch("ckpt", "verify", run, "--json").data
    assert row["tier"] == str(tmp_path / "slow")


def test_gc_keeps_sound_parts(orch: Type, seeds: Seeds, run: str, nodes: tuple[Path, Path]) -> None:
    seeds.checkpoint(run, 60, Trust.COMMITTED)
    seeds.store.trust(run, nodes[0].name, Trust.CORRUPT, "digest differs", epoch=seeds.epoch, now=time.time())
    (nodes[1] / "__1_0.distcp").write_bytes(b"y" * 499 + b"!")
    over(seeds, run)
    seeds.drop_lease()
    done = orch("ckpt", "gc", run, "--refused", "--json")
    assert [row["done"] for row in done.data] == ["left", "deleted"]
    assert "one node's part of a checkpoint" in done.data[0]["reason"]
    assert (nodes[0].exists(), nodes[1].exists()) == (True, False)


def test_pin_stays_if_another_tier_has_the_checkpoint(
    orch: Type, seeds: Seeds, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds.tiers(run, {"path": "run"}, {"path": str(tmp_path / "slow")})
    (tmp_path / "slow" / run).mkdir(parents=True)
    make(LocalStorage(tmp_path / "slow" / run), 50, nonce=NONCE)
    write = garbage.pin

    def overtaken(storage: Storage, name: str, note: str, now: float) -> None:
        write(storage, name, note, now)
        shutil.rmtree(folder(seeds, run) / name)

    monkeypatch.setattr(garbage, "pin", overtaken)
    assert orch("ckpt", "pin", f"{run}@50").code == 0
    assert garbage.pinned_names(LocalStorage(folder(seeds, run))) == {NAME}
