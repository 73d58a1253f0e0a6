"""A config.json that somebody has edited changes nothing: `status` and `resume` say so, and what to type instead."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.compose import compose
from orchestrator.config.layers import is_override
from orchestrator.states import RunState
from orchestrator.submission import create_run
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from trainer.protocol.run_dir import RunDir


class Submitted:
    """A run with its folder; `edit` is somebody with an editor."""

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


def test_an_edit_is_told_with_what_to_type(orch: Type, made: Callable[..., Submitted]) -> None:
    run = made()
    assert warning(orch("status", run.name, "--json")) == ""
    run.edit(lambda data: data["cluster"].update(mem="2G", constraint="a b") or data["optimizer"].update(lr=0.001))
    said = warning(orch("status", run.name, "--json"))
    start = f"{run.path} was edited: that changes nothing; type orch resume {run.name} "
    assert said.startswith(start)
    typed = shlex.split(said.removeprefix(start))
    assert sorted(typed) == ["cluster.constraint=a b", "cluster.mem=2G", "optimizer.lr=0.001"]
    assert all(is_override(word) for word in typed)
    assert said in orch("status", run.name).err
    assert warning(orch("status", "--json")) == "", "the table of all runs reads no folder"


def test_what_is_written_otherwise_and_means_the_same_is_no_edit(orch: Type, made: Callable[..., Submitted]) -> None:
    run = made()
    run.edit(lambda data: None)
    assert warning(orch("status", run.name, "--json")) == ""


@pytest.mark.parametrize(
    ("state", "command"),
    [(RunState.QUEUED, "`orch cancel {run}`, then `orch resume {run} cluster.mem=2G`"),
     (RunState.FAILED, "orch resume {run} cluster.mem=2G")],
)  # fmt: skip
def test_command_fits_state(orch: Type, made: Callable[..., Submitted], state: RunState, command: str) -> None:
    run = made(state)
    run.edit(lambda data: data["cluster"].update(mem="2G"))
    assert warning(orch("status", run.name, "--json")).endswith(f"type {command.format(run=run.name)}")


def test_what_cannot_be_read_or_told_is_noticed_too(orch: Type, made: Callable[..., Submitted]) -> None:
    run = made()
    run.edit(lambda data: data["train"].update(seed=2, steps=3) or data["optimizer"].update(lr=1.0, warmup_steps=4))
    assert warning(orch("status", run.name, "--json")).endswith(f"type orch resume {run.name} KEY=VALUE")
    run.path.write_text("{,}")
    assert warning(orch("status", run.name, "--json")).endswith(f"type orch resume {run.name} KEY=VALUE")
    run.path.unlink()
    assert warning(orch("status", run.name, "--json")) == ""


def test_resume_warns_of_edits(orch: Type, made: Callable[..., Submitted], monkeypatch: Patch) -> None:
    monkeypatch.setattr("orchestrator.controller.service.tick_once", lambda *_, **__: None)
    run = made()
    run.edit(lambda data: data["cluster"].update(mem="2G"))
    done = orch("resume", run.name, "--no-controller")
    assert (done.code, f"orch resume {run.name} cluster.mem=2G" in done.err) == (0, True)
    digest = run.store.put_config(json.loads(run.path.read_text()))
    run.store.note_run(run.name, epoch=1, now=3.0, config_digest=digest)
    assert warning(orch("status", run.name, "--json")) == ""
