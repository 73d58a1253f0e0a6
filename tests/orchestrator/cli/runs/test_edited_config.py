"""`status` and `resume` warn about an edited config.json, which changes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.compose import compose
from orchestrator.states import RunState
from orchestrator.submission import create_run
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from trainer.protocol.run_dir import RunDir


class Submitted:
    def __init__(self, seeds: Seeds, tmp_path: Path, state: RunState) -> None:
        text = tmp_path / "text.txt"
        text.write_text("to be or not to be " * 200)
        words = [f"cluster.root={tmp_path / 'runs'}", f"data.text=[{text}]", "train.seq_len=16"]
        composed = compose("tiny-gpt", words)
        run, _ = create_run.create_run(seeds.store, composed, cluster="local", now=1.0)
        seeds.store.move_run(run.name, state, "for some reason", epoch=seeds.epoch, now=2.0)
        self.name, self.path = run.name, RunDir(Path(run.run_dir)).config
        self.store = seeds.store

    def edit(self, change: Callable[[dict[str, Any]], Any]) -> None:
        data = json.loads(self.path.read_text())
        change(data)
        self.path.write_text(json.dumps(data, indent=2))


@pytest.fixture
def made(seeds: Seeds, tmp_path: Path) -> Callable[..., Submitted]:
    return lambda state=RunState.HELD: Submitted(seeds, tmp_path, state)


def warning(typed: Any) -> str:
    (found,) = [item["message"] for item in typed.answer["warnings"] if item["code"] == "edited_config"] or [""]
    return str(found)


def test_edits_are_reported_with_the_command(orch: Type, made: Callable[..., Submitted]) -> None:
    run = made()
    run.edit(lambda data: None)
    assert warning(orch("status", run.name, "--json")) == "", "the same values in another format"
    run.edit(lambda data: data["cluster"].update(mem="2G") or data["optimizer"].update(lr=0.001))
    said = warning(orch("status", run.name, "--json"))
    assert said == f"{run.path} was edited, which has no effect; use `orch resume {run.name} KEY=VALUE`"
    assert said in orch("status", run.name).err
    assert warning(orch("status", "--json")) == "", "the table of all runs reads no folder"


def test_live_run_must_be_cancelled_first(orch: Type, made: Callable[..., Submitted]) -> None:
    run = made(RunState.QUEUED)
    run.edit(lambda data: data["cluster"].update(mem="2G"))
    command = f"use `orch cancel {run.name}`, then `orch resume {run.name} KEY=VALUE`"
    assert warning(orch("status", run.name, "--json")).endswith(command)


def test_finished_run_is_branched(orch: Type, made: Callable[..., Submitted]) -> None:
    run = made(RunState.SUCCEEDED)
    run.edit(lambda data: data["optimizer"].update(lr=0.001))
    command = f"use `orch submit --from {run.name} KEY=VALUE`"
    assert warning(orch("status", run.name, "--json")).endswith(command)


def test_damaged_or_missing_file(orch: Type, made: Callable[..., Submitted]) -> None:
    run = made()
    for text in ("{,}", "[" * 100_000):
        run.path.write_text(text)
        assert warning(orch("status", run.name, "--json")).endswith(f"use `orch resume {run.name} KEY=VALUE`")
    run.path.unlink()
    assert warning(orch("status", run.name, "--json")) == ""


def test_resume_warns_of_edits_until_they_are_in_force(
    orch: Type, made: Callable[..., Submitted], monkeypatch: Patch
) -> None:  # fmt: skip
    monkeypatch.setattr("orchestrator.controller.service.tick_once", lambda *_, **__: None)
    run = made()
    run.edit(lambda data: data["cluster"].update(mem="2G"))
    done = orch("resume", run.name, "--no-controller")
    assert (done.code, "was edited, which has no effect" in done.err) == (0, True)
    digest = run.store.put_config(json.loads(run.path.read_text()))
    run.store.note_run(run.name, epoch=1, now=3.0, config_digest=digest)
    assert warning(orch("status", run.name, "--json")) == ""
