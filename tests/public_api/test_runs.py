"""`orch.submit`, `orch.status` and `orch.wait`: the command line's own answers and errors, as objects."""

import math
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import orch
from orch import command_line, runs
from orchestrator.config.layers import from_overrides

ROW = {
    "run": "a-1", "state": "RUNNING", "step": 7, "total_steps": 9, "loss": "nan", "attempts": 2, "generations": 3,
    "job_id": "12", "cluster": "slurm", "nodes": ["n1", "n2"], "reason": None, "updated_at": "2026-11-23T07:23:16.5Z",
    "last_checkpoint": {"step": 5, "trust": "VERIFIED", "age_s": 4.5}, "new_key": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    seen: list[tuple[str, ...]] = []

    def ask(*words: str, options: Any = (), accept: Any = ()) -> Any:
        seen.append((*words, *options))
        return ROW if words[0] in ("submit", "wait") else [ROW]

    monkeypatch.setattr(runs, "ask", ask)
    return seen


def test_errors_have_hints() -> None:
    with pytest.raises(orch.ConfigError, match="unknown key `train.step`") as typo:
        orch.submit("tiny-gpt", {"train.step": 3})
    assert "did you mean `train.steps`?" in typo.value.hint
    with pytest.raises(orch.NotFound, match="there is no registry yet") as refused:
        orch.status("nope")
    assert any("`orch submit tiny-gpt` starts the first run" in note for note in refused.value.__notes__)
    with pytest.raises(orch.ConfigError, match="CONFIG is missing"):
        orch.submit()
    with pytest.raises(orch.ConfigError, match="timeout"):
        orch.wait("nope", timeout=-1)


def test_run_fields(typed: list[tuple[str, ...]]) -> None:
    (run,) = orch.status("a")
    assert (run.name, run.state, run.step, run.total_steps, run.reason) == ("a-1", "RUNNING", 7, 9, "")
    assert run.loss is not None
    assert math.isnan(run.loss)
    assert run.last_checkpoint == orch.LastCheckpoint(step=5, trust="VERIFIED", age=4.5)
    assert run.updated_at == datetime(2026, 11, 23, 7, 23, 16, 500000, tzinfo=UTC)
    assert run.nodes == ("n1", "n2")
    assert not run.is_over


def test_python_values(typed: list[tuple[str, ...]]) -> None:
    values = {"optimizer.lr": 1e-4, "data.shuffle": False, "command": ["python", "a b.py"], "data.path": None}
    orch.submit(
        Path("x.yaml"), values, name="n", cluster="local", tags=["t", "u"], begin_with="a-1@5", weights_only=True
    )
    assert typed[0] == (
        "submit", "x.yaml", "optimizer.lr=0.0001", "data.shuffle=false", 'command=["python", "a b.py"]',
        "data.path=null", "--weights-only", "--name=n", "--cluster=local", "--from=a-1@5", "--tag=t", "--tag=u",
    )  # fmt: skip
    assert typed[1] == ("status", "a-1")
    orch.submit("x.yaml", ["train.steps=3"])
    assert typed[2] == ("submit", "x.yaml", "train.steps=3")
    with pytest.raises(TypeError, match="a mapping or a list"):
        orch.submit("x.yaml", "train.steps=3")


@pytest.mark.parametrize(
    ("state", "error"),
    [("SUCCEEDED", None), ("FAILED", orch.RunFailed), ("HELD", orch.RunFailed), ("CANCELLED", orch.RunCancelled)],
)
def test_wait_result(monkeypatch: pytest.MonkeyPatch, state: str, error: type[Exception] | None) -> None:
    monkeypatch.setattr(runs, "ask", lambda *words, options, accept: ROW | {"state": state, "reason": "why"})
    if error is None:
        assert orch.wait("a-1").is_over
        return
    with pytest.raises(error, match=f"a-1 is {state}: why"):
        orch.wait("a-1")


def test_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    program = 'import json; print(json.dumps({"data": 3, "warnings": [{"code": "c", "message": "look"}]}))'
    monkeypatch.setattr(command_line, "_PROGRAM", program)
    with pytest.warns(orch.OrchWarning, match="look"):
        assert command_line.ask("status") == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", orch.OrchWarning)
        assert command_line.ask("status") == 3


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise SystemExit(3)", "ended with exit code 3 without an answer"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9 without an answer"),
        ("print([])", "ended with exit code 0 without an answer"),
    ],
)
def test_no_answer(monkeypatch: pytest.MonkeyPatch, program: str, told: str) -> None:
    monkeypatch.setattr(command_line, "_PROGRAM", program)
    with pytest.raises(orch.OrchError, match=f"orch {told}") as error:
        command_line.ask("status", "x")
    assert error.value.where == "status x"


def test_foreign_modules_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONINSPECT", "1")
    monkeypatch.setenv("PYTHONIOENCODING", "utf-16")
    for name in ("trainer.py", "orchestrator.py", "click.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    assert orch.status() == []


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (1e-7, "k=1e-07"), (math.inf, "k=.inf"), (-math.inf, "k=-.inf"), (math.nan, "k=.nan"), (True, "k=true"),
        (Path("/a b"), 'k="/a b"'), ("a\x85b", 'k="a\\u0085b"'), ("null", 'k="null"'), ({"a": [1]}, 'k={"a": [1]}'),
    ],
)  # fmt: skip
def test_values_round_trip(typed: list[tuple[str, ...]], value: Any, word: str) -> None:
    orch.submit("x.yaml", {"k": value})
    assert typed[0] == ("submit", "x.yaml", word)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"tags": "sweep"}, r"tags must be a list of strings: \['sweep'\]"),
        ({"name": 5}, "--name must be a string, not 5"),
        ({"overrides": {"k": {1}}}, r"k=\{1\} cannot be written into a configuration"),
        ({"overrides": ["--dry-run"]}, "--dry-run is an option, not an override"),
        ({"overrides": [3]}, "an override must be a string, not 3"),
    ],
)  # fmt: skip
def test_invalid_arguments(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises((TypeError, ValueError), match=what):
        orch.submit("x.yaml", **arguments)


def test_run_as_argument(typed: list[tuple[str, ...]]) -> None:
    (run,) = orch.status("a-1")
    orch.status(run)
    run.refresh()
    assert typed[1:] == [("status", "a-1"), ("status", "a-1")]


def test_names_like_options() -> None:
    with pytest.raises(orch.NotFound):
        orch.status("--help")
    with pytest.raises(orch.NotFound):
        orch.submit("--help")


def test_message_of_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, os, signal, sys, time\n"
        "def stop(*_):\n"
        "    print(json.dumps({'error': {'message': 'detached: a-1 continues', 'hint': 'orch cancel a-1'}}))\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(command_line, "_PROGRAM", program)
    with pytest.warns(orch.OrchWarning, match="detached: a-1 continues"), pytest.raises(KeyboardInterrupt) as interrupt:
        command_line.ask("submit", "x")
    assert interrupt.value.__notes__ == ["detached: a-1 continues; orch cancel a-1"]


def test_run_is_not_constructed(typed: list[tuple[str, ...]]) -> None:
    with pytest.raises(TypeError, match=r"orch\.status\('a-1'\)\[0\]"):
        orch.Run("a-1")
    assert typed == []


@pytest.mark.parametrize(
    "text", ["\U0001f680 \xe4", "\\ud83d\\ude80", 'a"\\\U0001f680\\', "\u2028\n\t", "\U0010ffff\U00010000"]
)
def test_any_text(text: str) -> None:
    (word,) = runs._words({"+env.MOOD": text})
    assert word.isascii()
    assert from_overrides([word])[0].value == text
