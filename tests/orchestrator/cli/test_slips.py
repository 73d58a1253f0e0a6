"""What is typed for something else: a script, a key with dashes, an option of another program; what is offered."""

import shutil
from pathlib import Path

import pytest

from orchestrator.states import RunState
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
        (("submit", "tiny-gpt", "--lr", "name=x"), "a key is typed without dashes: optimizer.lr=VALUE\n"),
        (("resume", "tiny-1", "--batch-size", "8"), "a key is typed without dashes: train.batch_size=8\n"),
        (("submit", "tiny-gpt", "--zzzz"), "see `orch submit -h`\n"),
        (("status", "--steps", "5"), "see `orch status -h`\n"),
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


def test_a_list_is_offered_as_a_shell_takes_it(orch: Type) -> None:
    said = orch("submit", "torchrun-script", "command=python train.py").err
    assert "write a list: 'command=[python, train.py]'" in said


def test_what_was_tokenized_is_trained_on_as_it_is_said(orch: Type, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 2000)
    said = orch("data", "prepare", "text.txt", "--out", "tokens").err
    assert said.rstrip().endswith("train on them with  data.path=tokens '~data.text'")
    assert orch("config", "validate", "tiny-gpt", "data.path=tokens", "~data.text").code == 0


def test_a_rebuild_that_leaves_known_runs_out_says_how_to_have_them(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    seeds.run()
    lease = seeds.store.lease()
    assert lease is not None
    seeds.store.drop_lease(lease)
    (tmp_path / "other").mkdir()
    said = orch("db", "rebuild", "--root", tmp_path / "other").err
    assert "1 known runs lie in folders that were not named; with all of them: orch db rebuild --root " in said
    assert f"--root {tmp_path / 'other'} --root {seeds.root}" in said


def test_a_run_left_out_of_a_folder_that_was_named_is_not_said_to_lie_elsewhere(
    orch: Type, seeds: Seeds, caplog: pytest.LogCaptureFixture
) -> None:
    run = seeds.run()
    lease = seeds.store.lease()
    assert lease is not None
    seeds.store.drop_lease(lease)
    (seeds.root / run).mkdir(exist_ok=True)
    (seeds.root / run / "run.json").write_text("{")
    said = orch("db", "rebuild", "--root", seeds.root).err
    assert f"left out: {seeds.root / run}" in caplog.text
    assert "not named" not in said


def test_a_run_whose_folder_is_gone_is_not_offered_to_go_on(orch: Type, seeds: Seeds) -> None:
    run = seeds.run(state=RunState.SUCCEEDED)
    assert f"go on:    orch resume {run}" in orch("show", run).err
    shutil.rmtree(seeds.root / run)
    said = orch("show", run).err
    assert "folder" in said
    assert "go on:" not in said


def test_a_digest_that_no_stored_configuration_has_is_called_one(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    for digest in ("90ff", "abcdef123456"):
        said = orch("config", "diff", digest, run)
        assert said.code == 3
        assert f"no preset, file or run `{digest}`, and no stored configuration whose digest begins so" in said.err
        assert "type 6 or more digits of a digest in `orch show RUN`" in said.err
        assert "presets:" not in said.err
