"""`checkpoint.best`: which checkpoint `orch ckpt ls` calls the best, and what `RUN@best` means."""

import time

import pytest

from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import dump_line
from checkpointing.verification.verdicts import CopyVerdict, read_manifest_digest, record
from tests.checkpointing.made_checkpoint import make
from tests.orchestrator.cli.checkpoints.test_ckpt import NONCE, folder
from tests.orchestrator.cli.conftest import Seeds, Type

LOSSES = {50: 2.5, 100: 2.25, 150: 2.75, 200: None}


@pytest.fixture
def run(seeds: Seeds) -> str:
    name = seeds.run()
    root = folder(seeds, name)
    root.mkdir(parents=True)
    for step, loss in LOSSES.items():
        extra = {"loss": 9.0 - step / 100, "metrics": {} if loss is None else {"val_loss": loss}}
        make(LocalStorage(root), step, nonce=NONCE, now=time.time(), extra=extra)
    configure(seeds, name, metric="val_loss")
    return name


def configure(seeds: Seeds, run: str, **best: object) -> None:
    (seeds.root / run / "config.json").write_text(dump_line({"checkpoint": {"best": best}}))


def named(step: int) -> str:
    return f"step-{step:08d}.001-{NONCE}"


def chosen(orch: Type, run: str) -> int:
    (row,) = orch("ckpt", "verify", f"{run}@best", "--json").data
    return int(row["step"])


def test_the_list_shows_every_number_and_the_best(orch: Type, run: str) -> None:
    rows = orch("ckpt", "ls", run, "--json").data
    assert {row["step"]: (row["metric"], row["best"]) for row in rows} == {
        50: ({"val_loss": 2.5}, False), 100: ({"val_loss": 2.25}, True), 150: ({"val_loss": 2.75}, False),
        200: (None, False),
    }  # fmt: skip
    said = orch("ckpt", "ls", run).out.splitlines()
    best = said[0].split("\t").index("BEST")
    assert [line.split("\t")[best] for line in said[1:]] == [
        "",
        "val_loss 2.7500",
        "val_loss 2.2500 best",
        "val_loss 2.5000",
    ]


def test_the_best_is_what_the_mode_says(orch: Type, seeds: Seeds, run: str) -> None:
    assert chosen(orch, run) == 100
    configure(seeds, run, metric="val_loss", mode="max")
    assert chosen(orch, run) == 150
    configure(seeds, run, metric="loss")
    assert chosen(orch, run) == 200


def test_bad_checkpoint_is_never_the_best(orch: Type, seeds: Seeds, run: str) -> None:
    storage = LocalStorage(folder(seeds, run))
    where = str(folder(seeds, run))
    found = read_manifest_digest(storage, named(100))
    record(
        storage, CopyVerdict(name=named(100), place=where, manifest=found, ok=False, level=2, at=1.0, reason="a bit")
    )
    assert chosen(orch, run) == 50


def test_best_without_metric(orch: Type, seeds: Seeds, run: str) -> None:
    configure(seeds, run)
    said = orch("ckpt", "verify", f"{run}@best")
    assert said.code == 2
    assert f"{run} has no checkpoint.best.metric" in said.err
    configure(seeds, run, metric="accuracy")
    said = orch("ckpt", "verify", f"{run}@best")
    assert said.code == 3
    assert f"no checkpoint of {run} has a value for accuracy yet" in said.err
    assert all(row["best"] is False for row in orch("ckpt", "ls", run, "--json").data)
