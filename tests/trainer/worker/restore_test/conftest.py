"""Runs with a few checkpoints, and restore tests of them on real ranks."""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import canonical
from checkpointing.verification.verdicts import read_manifest_digest
from tests.trainer.conftest import Ranks, Run, merged, ranks_of_node
from trainer.protocol.config import hash_config
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.restore_test import RestoreTestOrder, RestoreVerdict, write_order
from trainer.protocol.run_dir import RunDir

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "same": (2, {"dp_shard": 2}),
    "1": (1, {}),
    "1x2": (2, {"tp": 2}),
    "1x4": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
STEPS, EVERY, TESTED, OLDER = 12, 3, 6, 3


@dataclass
class Subject:
    ranks: Ranks
    source: Run
    place: Path
    numbers: Any

    def folder(self, step: int = TESTED) -> Path:
        (found,) = self.source.dir.checkpoints.glob(f"step-{step:08d}.*")
        return found

    def copy(self, step: int = TESTED) -> Path:
        target = self.place / f"copy-{next(self.numbers)}" / self.folder(step).name
        shutil.copytree(self.folder(step), target)
        return target

    def begin(
        self, folder: Path, layout: str = "same", world: int = 0, parallel: dict[str, int] | None = None,
        over: dict[str, Any] | None = None, **order: Any,
    ) -> Run:  # fmt: skip
        own = "1" if self.source.world == 1 else "same"
        world, parallel = (world, parallel or {}) if world else LAYOUTS[own if layout == "same" else layout]
        config = json.loads(self.source.dir.config.read_text())
        config["cluster"] = {**config["cluster"], **ranks_of_node(world)}
        config["parallel"] = parallel
        config["checkpoint"] = {"every": 0}
        config = merged(config, over or {})
        run = RunDir(self.place / f"test-{next(self.numbers)}")
        run.make()
        run.config.write_bytes(canonical(config))
        asked = RestoreTestOrder(
            **{
                "run": "source", "run_dir": str(self.source.dir.path), "place": str(folder.parent),
                "checkpoint": folder.name, "step": int(folder.name[5:13]), "layout": layout,
                "same_layout": layout == "same",
                "config_digest": hash_config(json.loads(self.source.dir.config.read_text())), **order,
            }
        )  # fmt: skip
        write_order(run, asdict(asked))
        run.attempt(1).make()
        LaunchToken(attempt=1, epoch=1, job_id="1", nonce="9999abcd").write(run.attempt(1).go)
        return Run(ranks=self.ranks, dir=run, world=world)

    def verdict(self, folder: Path, layout: str = "same", **order: Any) -> RestoreVerdict:
        test = self.begin(folder, layout, **order)
        answer = test.train()
        assert answer["codes"] == [0] * test.world, test.log()
        found = RestoreVerdict.read(test.attempt)
        shutil.rmtree(test.dir.path)
        return found

    def manifest(self, step: int = TESTED) -> str:
        return read_manifest_digest(LocalStorage(self.source.dir.checkpoints), self.folder(step).name)


@pytest.fixture
def tested(ranks: Ranks, undisturbed: Callable[..., Run], tmp_path: Path) -> Subject:
    return _subject(ranks, undisturbed, tmp_path, "bfloat16")


@pytest.fixture
def tested_alone(ranks: Ranks, undisturbed: Callable[..., Run], tmp_path: Path) -> Subject:
    return _subject(ranks, undisturbed, tmp_path, "bfloat16", world=1)


@pytest.fixture
def tested_in_float32(ranks: Ranks, undisturbed: Callable[..., Run], tmp_path: Path) -> Subject:
    """In float32, sums in another order differ so little that another layout reveals damage."""
    return _subject(ranks, undisturbed, tmp_path, "float32")


def _subject(ranks: Ranks, undisturbed: Callable[..., Run], place: Path, dtype: str, world: int = 2) -> Subject:
    source = _saved_at_every_step(undisturbed, dtype, world)
    place = place / f"{dtype}-{world}"
    place.mkdir()
    return Subject(ranks, source, place, itertools.count(1))


def _saved_at_every_step(undisturbed: Callable[..., Run], dtype: str, world: int) -> Run:
    """Repeat the run if a save was skipped because two others were still being written."""
    for number in range(10):
        source = undisturbed(
            world, name=f"source{number}", parallel={"dp_shard": world}, train={"steps": STEPS, "dtype": dtype},
            checkpoint={"every": EVERY, "keep": 100},
        )  # fmt: skip
        saved = {int(path.name[5:13]) for path in source.dir.checkpoints.glob("step-*")}
        if saved == set(range(EVERY, STEPS + 1, EVERY)):
            return source
    raise AssertionError(f"of ten runs none has saved at every {EVERY} steps")
