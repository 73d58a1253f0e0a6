"""Lightning checkpoints: files with a step, and folders of shards, and which `fit` is offered one."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.agent.adapters import registry

LIGHTNING = registry.load("lightning")


def test_files_and_folders_of_shards(tmp_path: Path) -> None:
    for name in ("epoch=0-step=176.ckpt", "epoch=1-step=20-v1.ckpt", "last.ckpt", "notes-step=3.txt"):
        (tmp_path / name).write_bytes(b"PK")
    shards = tmp_path / "epoch=2-step=300.ckpt"
    shards.mkdir()
    found = LIGHTNING.checkpoints(str(tmp_path))
    assert [step for step, _ in found] == [20, 176, 300]
    assert [LIGHTNING.damage(path) for _, path in found] == ["", "", "lacks meta.pt"]
    (shards / "meta.pt").write_bytes(b"PK")
    assert LIGHTNING.damage(str(shards)) == "lacks .metadata"
    (shards / ".metadata").write_bytes(b"x")
    assert LIGHTNING.damage(str(shards)) == ""
    (tmp_path / "epoch=0-step=176.ckpt").write_bytes(b"")
    assert LIGHTNING.damage(found[1][1]) == "is empty"


class Fits:
    """Fits of one process that is offered the checkpoint at this path, and what they report."""

    def __init__(self, offered: str) -> None:
        self.reports: list[tuple[bool, bool]] = []
        rank = SimpleNamespace(begin_training=lambda *, resumes, mixed: self.reports.append((resumes, mixed)))
        self._fits: Any = LIGHTNING.Fits(offered, SimpleNamespace(rank=rank))  # type: ignore[attr-defined]

    def begin(self, *, root: str = ".", dirpath: str = "", logs: str = "", tuner: bool = False) -> str:
        trainer = SimpleNamespace(
            checkpoint_callbacks=[SimpleNamespace(dirpath=dirpath or None)], default_root_dir=root,
            loggers=[SimpleNamespace(save_dir=logs)] if logs else [], callbacks=[SimpleNamespace(_early_exit=tuner)],
        )  # fmt: skip
        return str(self._fits.begin(trainer))


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("key", ["root", "dirpath", "logs"])
def test_the_fit_that_wrote_a_checkpoint_is_offered_it_and_no_other_one(key: str) -> None:
    """One `fit` per fold, each with a folder of its own, from a checkpoint of the second one."""
    below = {"root": "/checkpoints", "dirpath": "", "logs": "/version_3/checkpoints"}[key]
    offered = os.path.abspath(f"out/fold1{below}/epoch=0-step=60.ckpt")
    fits = Fits(offered)
    places: list[dict[str, str]] = [{"root": f"out/fold{fold}"} | {key: f"out/fold{fold}"} for fold in range(3)]
    assert [fits.begin(**place) for place in places] == ["", offered, ""]  # type: ignore[arg-type]
    assert fits.reports == [(False, False), (True, False), (False, False)]


@pytest.mark.usefixtures("_here")
def test_fits_that_save_in_one_place_are_reported() -> None:
    offered = os.path.abspath("lightning_logs/version_0/checkpoints/epoch=0-step=60.ckpt")
    fits = Fits(offered)
    assert [fits.begin(), fits.begin(), fits.begin(dirpath="best")] == [offered, "", ""]
    assert fits.reports == [(True, False), (False, True), (False, True)]  # `best` is below the first one's folder


@pytest.mark.usefixtures("_here")
def test_a_checkpoint_from_before_the_run_is_the_programs_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCH_RESUME_EARLIER", "1")
    fits = Fits(os.path.abspath("checkpoints/step=60.ckpt"))
    assert fits.begin() == ""
    assert fits.reports == [(False, False)]


@pytest.mark.usefixtures("_here")
def test_a_trial_of_the_tuner_is_no_fit_of_the_program() -> None:
    fits = Fits(os.path.abspath("checkpoints/step=60.ckpt"))
    assert fits.begin(tuner=True) == ""
    assert fits.begin().endswith("step=60.ckpt")
    assert fits.reports == [(True, False)]
