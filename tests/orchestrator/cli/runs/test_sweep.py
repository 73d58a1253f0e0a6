"""`orch sweep`, and the sweep's runs in `orch status` and `orch cancel`; the runs themselves never start here."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.errors import Precondition
from orchestrator.home import registry_path
from orchestrator.registry.records import NewRun
from orchestrator.registry.store import Store
from orchestrator.states import RunState
from tests.orchestrator.cli.conftest import Patch, Type, Typed
from trainer.protocol.run_dir import RunDir

Sweep = Callable[..., Typed]


@pytest.fixture
def sweep(orch: Type, tmp_path: Path, monkeypatch: Patch) -> Sweep:
    import orchestrator.controller

    fake = SimpleNamespace(ensure_running=lambda path, kind: False)
    monkeypatch.setattr(orchestrator.controller, "service", fake, raising=False)
    monkeypatch.setitem(sys.modules, "orchestrator.controller.service", fake)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    fixed = [f"cluster.root={tmp_path / 'runs'}", "cluster.kind=local", f"data.text=[{text}]"]
    return lambda *more: orch("sweep", "tiny-gpt", *fixed, *more)


AXES = ("-p", "optimizer.lr=1e-4,3e-4", "-p", "train.seed=1:2")


def test_every_point_becomes_a_run_once(sweep: Sweep, orch: Type, tmp_path: Path) -> None:
    first = sweep(*AXES, "--max", 2, "-n", "scan", "-t", "night", "--json").data
    assert (first["sweep"], first["limit"]) == ("scan", 2)
    assert [row["run"] for row in first["runs"]] == [f"scan-{number}" for number in (1, 2, 3, 4)]
    assert all(row["created"] for row in first["runs"])
    again = sweep(*AXES, "--max", 3, "-n", "scan", "--json").data
    assert [(row["run"], row["created"]) for row in again["runs"]] == [(row["run"], False) for row in first["runs"]]
    larger = sweep("-p", "optimizer.lr=1e-4,3e-4", "-p", "train.seed=1:3", "-n", "scan", "--json").data
    assert sorted(row["run"] for row in larger["runs"] if row["created"]) == ["scan-5", "scan-6"]
    rows = orch("status", "--sweep", "scan", "--json").data
    assert [row["run"] for row in rows] == [f"scan-{number}" for number in range(1, 7)]
    assert rows[0]["sweep"]["point"] == {"optimizer.lr": "1e-4", "train.seed": "1"}
    assert {row["sweep"]["limit"] for row in rows} == {4}
    assert rows[0]["tags"] == ["night"]
    with Store.open(registry_path(), readonly=True) as store:
        config = store.config(store.run("scan-4").config_digest)
        member = store.run("scan-4").sweep
    assert (config["optimizer"]["lr"], config["train"]["seed"]) == (3e-4, 2)
    new = NewRun(
        slug="scan", cluster="local", root=tmp_path, config_digest="", total_steps=1, identity={}, sweep=member
    )
    with Store.open(registry_path()) as store, pytest.raises(Precondition, match="scan-4 already has these values"):
        store.create_run(new, now=1.0, nonce="0" * 8)
    record = json.loads((RunDir(Path(orch("show", "scan-4", "--json").data["run_dir"])).record).read_text())
    assert record["run"]["sweep"]["point"] == {"optimizer.lr": "3e-4", "train.seed": "2"}


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("-p", "optimizer.rate=1,2"), 2, "optimizer.rate"),
        (("-p", "train.steps=10,many"), 2, "in the point train.steps=many; nothing was submitted"),
        (("-p", "train.steps=10,20", "train.steps=5"), 2, "train.steps is both fixed and varied"),
        (("-p", "train.steps"), 2, "is not KEY=VALUES"),
        (("-p", "train.steps=1:3", "--random", "9"), 2, "these values allow at most 3"),
        (("--max", "2"), 2, "--param"),
        (("-p", "train.steps=1:3", "--max", "0"), 2, "--max"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_recorded(
    sweep: Sweep, words: tuple[str, ...], code: int, told: str
) -> None:
    said = sweep(*words)
    assert (said.code, told in said.err) == (code, True), said.err
    assert not registry_path().exists()


def test_another_configuration_under_the_same_name_is_refused(sweep: Sweep) -> None:
    assert sweep(*AXES).code == 0
    said = sweep(*AXES, "train.steps=7")
    assert said.code == 4
    assert "the sweep tiny-gpt exists, and its runs differ in more than the varied keys" in said.err
    assert "-n OTHER" in said.err


def test_a_dry_run_records_nothing(sweep: Sweep) -> None:
    said = sweep(*AXES, "--dry-run")
    assert said.code == 0
    assert "nothing was submitted; 4 of 4 runs are new" in said.err
    assert not registry_path().exists()


def test_the_table_has_values_loss_and_validation(sweep: Sweep, orch: Type) -> None:
    sweep(*AXES)
    with Store.open(registry_path()) as store:
        lease = store.take_lease("me:1:1", time.time(), 60.0)
        assert lease is not None
        stamp = {"epoch": lease.epoch, "now": time.time()}
        store.move_run("tiny-gpt-1", RunState.QUEUED, "queued", **stamp, loss=2.25, step=40)
        attempt = RunDir(Path(store.run("tiny-gpt-1").run_dir)).attempt(1)
        lines = [{"step": step, "metrics": {"val_loss": loss}} for step, loss in ((20, 2.75), (40, 2.5))]
        attempt.validation.write_text("".join(json.dumps(line) + "\n" for line in lines))
        store.drop_lease(lease)
    table = orch("status", "--sweep", "tiny-gpt")
    titles, first, *rest = [line.split("\t") for line in table.out.splitlines()]
    assert titles[:7] == ["RUN", "STATE", "optimizer.lr", "train.seed", "STEP", "LOSS", "VALIDATION"]
    assert first[:4] == ["tiny-gpt-1", "QUEUED", "1e-4", "1"]
    assert (float(first[5]), float(first[6])) == (2.25, 2.5)
    assert len(rest) == 3
    assert "sweep tiny-gpt: 1 QUEUED, 3 CREATED; at most 4 unfinished at once" in table.err
    assert orch("status", "--sweep", "tiny-gpt", "--json").data[0]["validation"] == {"val_loss": 2.5}


def test_unknown_sweeps_and_nothing_to_cancel(sweep: Sweep, orch: Type) -> None:
    sweep(*AXES)
    said = orch("status", "--sweep", "tiny-gtp")
    assert (said.code, "did you mean tiny-gpt?" in said.err) == (3, True)
    assert orch("cancel", "--sweep", "other").code == 3
    missing = orch("cancel")
    assert (missing.code, "Missing argument 'RUN...'" in missing.err) == (2, True)


def test_the_hint_names_each_sweep_once(sweep: Sweep, orch: Type) -> None:
    assert sweep(*AXES, "-n", "scan").code == 0
    assert sweep(*AXES, "-n", "other").code == 0
    assert "sweeps: other, scan\n" in orch("status", "--sweep", "nothing-like-it").err
