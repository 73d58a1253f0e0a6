"""Every verb of `orch ckpt` on checkpoints that only an object store still has."""

from pathlib import Path

import pytest

from tests.checkpointing.engine.built_checkpoint import build  # isort: skip  # first: it imports torch quietly

import torch

from checkpointing.format.manifest import COMMIT
from checkpointing.storage.backends import Storage, open_storage
from checkpointing.storage.durable import dump_line
from orchestrator.states import AttemptState
from tests.orchestrator.cli.conftest import Seeds, Type

WEIGHT = torch.arange(32, dtype=torch.float32).view(8, 4) + 1


def send(folder: Path, storage: Storage) -> None:
    for file in sorted(folder.iterdir(), key=lambda file: file.name == COMMIT):
        storage.publish(f"{folder.name}/{file.name}", file.read_bytes())


@pytest.fixture
def store(seeds: Seeds, s3_url: str, tmp_path: Path) -> Storage:
    run = seeds.run()
    assert run == "tiny-1"
    storage = open_storage(f"{s3_url}/{run}")
    for step in (50, 100):
        built = build({"model/w": WEIGHT * step, "optimizer/w/step": torch.tensor(float(step))})
        built.extra = {"step": step, "consumed": step * 8}
        built.world = {"ranks": 0}
        built.nonce = seeds.store.attempts(run)[0].nonce
        send(built.write(seeds.root / run / "checkpoints" if step == 100 else tmp_path, step), storage)
    tiers = [{"path": "run"}, {"path": s3_url}]
    config = {"train": {"batch_size": 8}, "checkpoint": {"tiers": tiers}}
    (seeds.root / run / "config.json").write_text(dump_line(config))
    return storage


def test_checkpoint_in_store_only(orch: Type, store: Storage, s3_url: str, tmp_path: Path) -> None:
    rows = {row["step"]: row for row in orch("ckpt", "ls", "tiny-1", "--json").data}
    assert {step: row["tiers"] for step, row in rows.items()} == {100: ["run", s3_url], 50: [s3_url]}
    assert rows[50]["path"] == f"{s3_url}/tiny-1/{rows[50]['name']}"
    room = {row["tier"]: (row["count"], row["bytes"]) for row in orch("ckpt", "du", "--json").data}
    assert room[s3_url][0] == 2
    assert room[s3_url][1] > room["run"][1] > WEIGHT.nbytes
    done = orch("ckpt", "export", "tiny-1@50", tmp_path / "out", "--to", "torch", "--json")
    assert done.code == 0, done.out
    found = torch.load(tmp_path / "out" / done.data["files"][0]["name"], weights_only=True)
    assert torch.equal(found["model"]["w"], WEIGHT * 50)
    answer = orch("ckpt", "diff", "tiny-1@50", "tiny-1@100", "--json").data
    assert answer["first"].startswith(s3_url)
    assert [row["tensor"] for row in answer["tensors"]] == ["model/w", "optimizer/w/step"]
    assert orch("ckpt", "pin", "tiny-1@50").code == 0
    assert {row["step"]: row["pinned"] for row in orch("ckpt", "ls", "tiny-1", "--json").data} == {100: False, 50: True}


def test_every_level_of_verify_reads_the_store_and_names_damage(
    orch: Type, store: Storage, s3_url: str, tmp_path: Path
) -> None:
    done = orch("ckpt", "verify", "tiny-1@all", "--copies", "--level", 4, "--json")
    assert done.code == 0, done.out
    assert [(row["step"], row["tier"], row["ok"]) for row in done.data] == [
        (100, "run", True), (100, s3_url, True), (50, s3_url, True),
    ]  # fmt: skip
    url, file = done.data[2]["path"], f"{done.data[2]['name']}/__0_0.distcp"
    for level in range(4):
        by_url = orch("ckpt", "verify", url, "--level", level, "--json")
        assert (by_url.code, [row["ok"] for row in by_url.data]) == (0, [True]), level
    with store.open(file) as stream:
        data = bytearray(stream.read())
    data[800] ^= 1
    store.publish(file, bytes(data))
    for target, level in ((url, 2), (url, 3), ("tiny-1@50", 4)):
        bad = orch("ckpt", "verify", target, "--level", level, "--json")
        assert (bad.code, bad.data[0]["faults"][0]["tensors"][0]) == (7, "model/w")
    assert orch("ckpt", "export", "tiny-1@50", tmp_path / "out").code == 7


def test_gc_cleans_object_store(orch: Type, seeds: Seeds, store: Storage, s3_url: str) -> None:
    name = "step-00000120.001-0123abcd"
    store.publish(f"{name}/__0_0.distcp", b"x" * 100)
    (row,) = orch("ckpt", "gc", "tiny-1", "--json").data
    assert (row["done"], row["tier"]) == ("left", s3_url)
    seeds.store.move_attempt("tiny-1", 1, AttemptState.ENDED, "over", epoch=seeds.epoch, now=1.0)
    room = {row["trust"]: row["collectable"] for row in orch("ckpt", "du", "--json").data if row["tier"] == s3_url}
    assert room == {"COMMITTED": 0, "debris": 100}
    (row,) = orch("ckpt", "gc", "tiny-1", "--json").data
    assert (row["done"], row["name"]) == ("deleted", name)
    assert name not in store.list("")
    assert len(store.list("")) == 2
