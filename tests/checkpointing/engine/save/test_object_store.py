"""A run with a tier in an object store: saved, flushed by the writer process, restored from there alone."""

import shutil
from pathlib import Path
from typing import Any

from checkpointing.config import CheckpointConfig, TierConfig
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.storage.backends import open_storage
from checkpointing.tiers.catalog import Catalog, Owner
from checkpointing.tiers.tier import RunTiers, resolve_tiers
from tests.checkpointing.engine.conftest import NONCE, blank, loaded, same, state
from tests.checkpointing.in_process_writer import InProcessWriter


def checkpointer(run: Path, url: str, reported: list[tuple[str, dict[str, Any]]], **options: Any) -> Checkpointer:
    config = CheckpointConfig(tiers=(TierConfig(), TierConfig(path=url)))
    known = resolve_tiers(config, run / "checkpoints", "my-run", "node-0")
    return made_for(RunTiers(known, open_storage(run / "checkpoints")), config, reported, **options)


def made_for(
    tiers: RunTiers, config: CheckpointConfig, reported: list[tuple[str, dict[str, Any]]], **options: Any
) -> Checkpointer:
    owner = Owner(1, NONCE, (), lambda: True)
    return Checkpointer(
        owner, World(), tiers, lambda kind, data: reported.append((kind, data)), config=config, **options
    )


def test_a_run_comes_back_from_the_object_store_alone(tmp_path: Path, s3_url: str) -> None:
    reported: list[tuple[str, dict[str, Any]]] = []
    first = checkpointer(tmp_path, s3_url, reported)
    first.prepare(state(2))
    first.save(2, state(2), {"position": 16})
    first.wait()
    assert first._flusher is not None
    assert first._flusher.drain(20.0)
    first.close()
    assert [kind for kind, data in reported if data.get("tier") == f"{s3_url}/my-run"].count("checkpoint.flushed") >= 1
    assert Catalog(f"{s3_url}/my-run").committed_entries()[0].step == 2

    shutil.rmtree(tmp_path / "checkpoints")
    second, tensors = checkpointer(tmp_path, s3_url, reported, link=InProcessWriter()), blank()
    second.prepare(tensors)
    restored = loaded(second.restore(tensors))
    assert (restored.step, restored.extra, restored.tier) == (2, {"position": 16}, f"{s3_url}/my-run")
    assert same(tensors, state(2))
    second.close()


def test_an_object_store_may_be_the_only_tier(tmp_path: Path, s3_url: str) -> None:
    reported: list[tuple[str, dict[str, Any]]] = []
    config = CheckpointConfig(tiers=(TierConfig(path=s3_url, keep=2),))
    only = resolve_tiers(config, tmp_path / "checkpoints", "my-run", "node-0")
    made = made_for(RunTiers(only, open_storage(tmp_path / "checkpoints")), config, reported, link=InProcessWriter())
    for step in (1, 2, 3):
        made.save(step, state(step), {})
        made.wait()
    tensors = blank()
    restored = made.restore(tensors)
    made.close()
    assert restored is not None
    assert restored.step == 3
    assert same(tensors, state(3))
    assert [entry.step for entry in only[0].catalog.committed_entries()] == [3, 2]
    assert [data["step"] for kind, data in reported if kind == "checkpoint.deleted"] == [1]
