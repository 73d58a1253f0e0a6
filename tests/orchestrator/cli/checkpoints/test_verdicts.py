"""What `orch ckpt verify` finds is written down, shown, and counts."""

import time
from pathlib import Path

import pytest

from checkpointing.storage.backends import LocalStorage
from checkpointing.verification.verdicts import known_bad, read_verdicts
from orchestrator.restore_tests.create import hold, write_verdict
from orchestrator.states import AttemptState, RunState
from tests.checkpointing.made_checkpoint import make
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.cli.forked_orch import on_a_terminal
from trainer.protocol.restore_test import Outcome

NONCE = "0123abcd"


@pytest.fixture
def root(seeds: Seeds) -> Path:
    place = seeds.root / seeds.run() / "checkpoints"
    place.mkdir(parents=True)
    for step in (50, 100):
        make(LocalStorage(place), step, nonce=NONCE, now=time.time())
    (place.parent / "config.json").write_text("{}")
    (place / f"step-00000050.001-{NONCE}" / "__1_0.distcp").write_bytes(b"z" * 500)
    return place


def test_a_bad_copy_is_written_down_and_shown(orch: Type, root: Path) -> None:
    assert orch("ckpt", "verify", "tiny-1@all").code == 7
    found = known_bad(LocalStorage(root), str(root), LocalStorage(root))
    assert found == {f"step-00000050.001-{NONCE}": "__1_0.distcp, chunk 0: digest differs"}
    rows = {row["step"]: row["verified"] for row in orch("ckpt", "ls", "tiny-1", "--json").data}
    told = {step: [(item["tier"], item["ok"], item["level"]) for item in items] for step, items in rows.items()}
    assert told == {50: [("run", False, 2)], 100: [("run", True, 2)]}
    said = orch("ckpt", "ls", "tiny-1").out
    assert ("INVALID on run" in said, "level 2" in said) == (True, True)


def test_restore_tests_are_listed_by_checkpoint(orch: Type, seeds: Seeds, root: Path) -> None:
    run = seeds.store.run("tiny-1")
    seeds.restore_test(run.name, 50, Outcome.CORRUPT, "digest differs", layout="2x4")
    good = seeds.store.restore_test(seeds.restore_test(run.name, 100, Outcome.RESTORED, "bit for bit"))
    under_way = seeds.store.restore_test(seeds.restore_test(run.name, 100, layout="1"))
    assert good is not None
    assert under_way is not None
    write_verdict(run, good, str(root), Outcome.RESTORED, "bit for bit", time.time())
    hold(run, under_way)
    head, newer, older = (line.split("\t") for line in orch("ckpt", "ls", run.name).out.splitlines())
    cells = dict(zip(head, newer, strict=True))
    assert (cells["TESTED"], cells["VERIFIED"]) == ("same; under way on 1", "restored")
    assert cells["PIN"] == f"restore test {under_way.test}"
    assert dict(zip(head, older, strict=True))["TESTED"] == "CORRUPT on 2x4"
    assert under_way.test in on_a_terminal(seeds.store, "ckpt", "ls", run.name)
    first, second = orch("ckpt", "ls", run.name, "--json").data
    assert [(test["test"], test["layout"], test["verdict"]) for test in first["restore_tests"]] == [
        (good.test, "same", "RESTORED"), (under_way.test, "1", None),
    ]  # fmt: skip
    (bad,) = second["restore_tests"]
    assert (bad["verdict"], bad["reason"]) == ("CORRUPT", "digest differs")


@pytest.mark.parametrize("level", [0, 1])
def test_a_look_at_some_bytes_is_no_verdict(orch: Type, root: Path, level: int) -> None:
    orch("ckpt", "verify", "tiny-1@all", "--level", level)
    assert read_verdicts(LocalStorage(root)) == []


def test_a_checkpoint_by_its_folder_is_the_run_s(orch: Type, root: Path) -> None:
    orch("ckpt", "verify", root / f"step-00000050.001-{NONCE}")
    assert list(known_bad(LocalStorage(root), str(root), LocalStorage(root))) == [f"step-00000050.001-{NONCE}"]


def test_read_only_run_folder(orch: Type, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(_storage: LocalStorage, path: str, _data: bytes) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(LocalStorage, "publish", read_only)
    done = orch("ckpt", "verify", "tiny-1@100")
    assert (done.code, "could not record the verification result" in done.err) == (0, True)


def test_gc_deletes_refused_copy(orch: Type, seeds: Seeds, root: Path) -> None:
    orch("ckpt", "verify", "tiny-1@all")
    now = time.time()
    seeds.store.move_attempt("tiny-1", 1, AttemptState.ENDED, "over", epoch=seeds.epoch, now=now)
    seeds.store.move_run("tiny-1", RunState.FAILED, "a bug", epoch=seeds.epoch, now=now)
    (row,) = orch("ckpt", "gc", "tiny-1", "--json").data
    assert (row["done"], "digest differs" in row["reason"]) == ("left", True)
    seeds.drop_lease()
    (row,) = orch("ckpt", "gc", "tiny-1", "--refused", "--json").data
    assert (row["done"], row["name"]) == ("deleted", f"step-00000050.001-{NONCE}")
    assert sorted(path.name for path in root.glob("step-*")) == [f"step-00000100.001-{NONCE}"]
    orch("ckpt", "verify", "tiny-1")
    assert [verdict.ok for verdict in read_verdicts(LocalStorage(root))] == [True], "what is gone needs no verdict"
