"""What is typed for something else: a script, a key with dashes, an option of another program; what is offered."""

from pathlib import Path

import pytest

from tests.orchestrator.cli.conftest import Seeds, Type


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("train.py", "x = 1\n"),
        ("my train.py", "x = 1\n"),
        ("go", "#!/bin/sh\n"),
        ("empty.yaml", ""),
        ("nodata.yaml", "name: mine\n"),
        ("inc.yaml", "includes: [cluster/locl]\n"),
    ):
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    ("script", "code", "typed"),
    [
        ("train.py", 2, "orch submit torchrun-script 'command=[python, train.py]'"),
        ("my train.py", 2, "orch submit torchrun-script 'command=[python, \"my train.py\"]'"),
        ("go", 2, "orch submit torchrun-script 'command=[./go]'"),
        ("gone.py", 3, "a script that is there: orch submit torchrun-script 'command=[python, gone.py]'"),
    ],
)
def test_a_script_is_submitted_as_a_command(orch: Type, script: str, code: int, typed: str) -> None:
    said = orch("submit", script)
    assert said.code == code
    assert typed in said.err


def test_what_cannot_be_submitted_alone_is_not_offered(orch: Type) -> None:
    said = orch("submit", "long")
    assert "train/long" not in said.err
    assert "presets: demo, slurm-first-run, tiny-gpt, torchrun-script" in said.err


def test_a_part_of_a_configuration_is_offered_to_who_includes_it(orch: Type) -> None:
    assert "did you mean cluster/local?" in orch("config", "validate", "inc.yaml").err


@pytest.mark.parametrize(
    ("file", "where"), [("empty.yaml", "empty.yaml, which is empty"), ("nodata.yaml", "nodata.yaml\n")]
)
def test_a_file_that_says_nothing_of_data_is_named(orch: Type, tmp_path: Path, file: str, where: str) -> None:
    said = orch("config", "validate", file)
    assert said.code == 2
    assert f"not set in {tmp_path}/{where}" in said.err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("submit", "tiny-gpt", "--steps", "5"), "a key is typed without dashes: train.steps=5\n"),
        (("submit", "tiny-gpt", "--train.steps=5"), "a key is typed without dashes: train.steps=5\n"),
        (("submit", "tiny-gpt", "--lr", "name=x"), "a key is typed without dashes: train.lr=VALUE\n"),
        (("resume", "tiny-1", "--batch-size", "8"), "a key is typed without dashes: train.batch_size=8\n"),
        (("submit", "tiny-gpt", "--zzzz"), "see `orch submit -h`\n"),
        (("status", "--steps", "5"), "see `orch status -h`\n"),
        (("logs", "tiny-1", "-n", "5"), "did you mean --tail 5?\n"),
        (("logs", "tiny-1", "-n5"), "did you mean --tail 5?\n"),
        (("logs", "tiny-1", "--tail", "10k"), "'10k' is not a whole number\n"),
        (("wait", "tiny-1", "--timeout", "soon"), "type seconds (60), or a number with s, m, h or d (1m)\n"),
    ],
)
def test_an_option_that_is_none(orch: Type, words: tuple[str, ...], offered: str) -> None:
    said = orch(*words)
    assert said.code == 2
    assert offered in said.err


@pytest.mark.parametrize("timeout", ["1m", "60"])
def test_a_time_may_have_a_unit(orch: Type, seeds: Seeds, timeout: str) -> None:
    assert orch("wait", "tiny-1", "--timeout", timeout).code == 3  # no such run: the time was understood


def test_a_run_where_a_configuration_is_asked_for(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    said = orch("config", "show", run)
    assert said.code == 3
    assert f"{run} is a run, and no preset or file" in said.err
    assert f"`orch show {run}` shows it; `orch config diff {run} CONFIG`" in said.err
