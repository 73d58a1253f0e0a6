"""Mistyped and misplaced words of a command line, and the hints that they get."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from orchestrator.states import RunState
from tests.orchestrator.cli.conftest import Patch, Seeds, Type

MODEL = """\
import orch
class Mine(orch.BaseWorkload):
    def build_model(self): ...
    def loss(self, model, batch): ...
"""
CONFIG = "includes: [cluster/local]\nworkload: {target: 'my_model:Mine', path: [.]}\n"


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("mine.yaml", CONFIG), ("my_model.py", MODEL), ("train.py", "x = 1\n"), ("my run.yml", CONFIG)):
        (tmp_path / name).write_text(text)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()
    return tmp_path


def test_missing_weights(orch: Type) -> None:
    said = orch("ckpt", "import", "weihgts", "mine.yaml")
    assert said.code == 3
    assert "weihgts does not exist" in said.err


def test_submit_from_export_is_refused(orch: Type) -> None:
    said = orch("submit", "mine.yaml", "--from", "weights", "optimizer.lr=1", "--weights-only", "--wait")
    assert said.code == 2
    assert "weights has exported weights, not a run's checkpoint" in said.err
    assert said.err.endswith("  `orch ckpt import weights CONFIG` begins a run with its weights\n")


def test_a_folder_of_another_kind_is_called_one(orch: Type, tmp_path: Path, seeds: Seeds) -> None:
    said = orch("submit", "tiny-gpt", "--from", tmp_path)
    assert said.code == 2
    assert f"`{tmp_path.name}` is not the name of a checkpoint's folder" in said.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("mine", "mine.yaml"),
        ("./mien.yaml", "./mine.yaml"),
        ("mine.yml", "mine.yaml"),
        ("my-run.yml", "'my run.yml'"),
        ("tiny-gp", "tiny-gpt"),
    ],
)
def test_the_nearest_configuration_is_offered(orch: Type, typed: str, meant: str) -> None:
    said = orch("submit", typed, "--dry-run")
    assert said.code == 3
    assert f"did you mean {meant}?\n" in said.err
    assert orch("submit", *shlex.split(meant), "--dry-run").code == 0


def test_mistyped_script(orch: Type) -> None:
    said = orch("submit", "trian.py")
    assert said.code == 3
    assert "did you mean train.py?\n" in said.err


def test_run_in_place_of_config(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    said = orch("submit", run, "optimizer.lr=1")
    assert said.code == 3
    assert f"{run} is a run, not a preset or file" in said.err
    assert f"orch resume {run} optimizer.lr=1 " in said.err
    assert f"orch submit --from {run} optimizer.lr=1\n" in said.err


def test_file_name_comes_before_run_prefix(orch: Type, seeds: Seeds) -> None:
    seeds.run("mine")
    assert "did you mean mine.yaml?" in orch("submit", "mine").err


@pytest.mark.parametrize("below", ["", "/", "/checkpoints/step-00000050.001-0123abcd"])
def test_folder_in_place_of_run_name(orch: Type, seeds: Seeds, below: str) -> None:
    run = seeds.run()
    said = orch("status", f"{seeds.root / run}{below}")
    assert said.code == 3
    assert "is a path, but a run name is needed" in said.err
    assert f"did you mean {run}?" in said.err


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("my_modle:Mine", "my_model:Mine"),
        ("my_model.py:Mine", "my_model:Mine"),
        ("./my_model.py:Mine", "my_model:Mine"),
        ("my_model.Mine", "my_model:Mine"),
        ("my_model:Mien", "my_model:Mine"),
    ],
)
@pytest.mark.parametrize("verb", ["submit", "config validate"])
def test_the_nearest_target_is_offered(orch: Type, verb: str, target: str, meant: str) -> None:
    said = orch(*verb.split(), "mine.yaml", f"workload.target={target}")
    assert said.code == 2
    assert f"did you mean {meant}?" in said.err
    assert orch("config", "validate", "mine.yaml", f"workload.target={meant}").code == 0


def test_misspelled_method_is_warned_of(orch: Type, here: Path) -> None:
    (here / "my_model.py").write_text(MODEL + "    def buidl_data(self, layout): ...\n")
    for words in (("config", "validate", "mine.yaml"), ("submit", "mine.yaml", "--dry-run")):
        said = orch(*words)
        assert said.code == 0
        assert "orch never calls Mine.buidl_data(): did you mean build_data()?" in said.err
    assert [each["code"] for each in orch("config", "validate", "mine.yaml", "--json").answer["warnings"]]


@pytest.mark.parametrize("word", ["kill", "run", "ls", "delete", "stop", "start"])
def test_no_harmful_verb_is_suggested(orch: Type, word: str) -> None:
    said = orch(word, "tiny-1")
    assert (said.code, said.err.splitlines()[-1].strip()) == (2, "see `orch -h`"), said.err
    assert not {"drill", "rm", "controller"} & {*re.findall(r"did you mean `(.*?)`", said.err)}


def test_unknown_tag(orch: Type, seeds: Seeds) -> None:
    orch("tag", seeds.run(), "baseline", "slow")
    listed = orch("status", "-t", "baselin")
    assert listed.code == 0
    assert "no run has the tag baselin; did you mean baseline?  tags: baseline, slow" in listed.err
    assert "no run has the tag" not in orch("status", "-t", "slow", "--state", "HELD").err
    compared = orch("compare", "-t", "baselin")
    assert compared.code == 2
    assert "no run has the tag baselin; did you mean baseline?  tags: baseline, slow" in compared.err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("--cluster", "slrum"), "'slrum' is not one of 'auto', 'local', 'slurm'"),
        (("cluster=nope",), "available: cluster/local, cluster/"),
        (("model=tiny",), "`includes: [model/"),
        (("checkpoint=5",), "keys in `checkpoint`: "),
    ],
)
def test_preset_as_value(orch: Type, words: tuple[str, ...], offered: str) -> None:
    said = orch("submit", "tiny-gpt", *words)
    assert said.code == 2
    assert offered in said.err


def test_two_sources_of_data(orch: Type, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 2000)
    orch("data", "prepare", "text.txt", "--out", "tokens")
    said = orch("config", "validate", "tiny-gpt", "data.path=tokens", "data.text=[text.txt]").err
    for words in ("'~data.text'", "'~data.path'"):
        assert words in said
        typed = ("data.path=tokens", "data.text=[text.txt]", *shlex.split(words))
        assert orch("config", "validate", "tiny-gpt", *typed).code == 0


def test_long_reason_is_cut_in_lists(orch: Type, seeds: Seeds) -> None:
    reason = "sbatch: error: " + "the partition is down and " * 60 + "that is all"
    run = seeds.run(state=RunState.HELD, reason=reason)
    assert "that is all" not in orch().out
    assert f"{run} is HELD: sbatch: error: the partition" in " ".join(orch().out.split())
    assert "more characters: orch show)" in " ".join(orch().out.split())
    assert "that is all" in orch("show", run).out
    assert "that is all" in orch("status").out, "a table for programs has all of it"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("nodes=2",), "did you mean `cluster.nodes`?"),
        (("train.step=5",), "did you mean `train.steps`?"),
        (("other.yaml",), "other.yaml is a second configuration, but only one is accepted"),
        (("+env.FOO",), "  +env.FOO=VALUE, or ~env.FOO for its default\n"),
    ],
)
def test_a_setting_that_is_typed_as_elsewhere(orch: Type, words: tuple[str, ...], offered: str) -> None:
    said = orch("submit", "tiny-gpt", *words)
    assert said.code == 2
    assert offered in said.err


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (("show", "tiny-1", "3"), "see `orch show -h`"),
        (("help", "submit"), "see `orch -h`"),
        (("ckpt", "help"), "see `orch ckpt -h`"),
        (("ckpt", "restore", "tiny-1"), "did you mean `restore-test`? `orch ckpt restore-test -h` explains it"),
    ],
)
def test_a_word_too_many(orch: Type, words: tuple[str, ...], typed: str) -> None:
    said = orch(*words)
    assert said.code == 2
    assert typed in said.err


@pytest.mark.parametrize("verb", ["submit", "submit --dry-run", "submit --print-sbatch", "config validate"])
def test_missing_script(orch: Type, here: Path, verb: str) -> None:
    said = orch(*verb.split(), "torchrun-script", "command=[python, trian.py]")
    assert said.code == 2
    assert f"command: no file {here}/trian.py" in said.err
    assert "did you mean 'command=[python, train.py]'?" in said.err


def test_the_nearest_fault(orch: Type, seeds: Seeds) -> None:
    said = orch("drill", seeds.run(), "kill-rnak")
    assert (said.code, "did you mean kill-rank?" in said.err) == (2, True)


def test_only_classes_are_offered_as_targets(orch: Type) -> None:
    said = orch("config", "validate", "mine.yaml", "workload.target=my_model:orhc")
    assert (said.code, "no orhc in" in said.err, "my_model:orch" in said.err) == (2, True, False), said.err


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("./mine.yml/",), 3, "did you mean ./mine.yaml?"),
        (("mine.yaml", "workload.path=my_model.py"), 2, "write a list: 'workload.path=[my_model.py]'"),
        (("torchrun-script", "command=[train.py]"), 2, "name its interpreter: 'command=[python, train.py]'"),
        (("torchrun-script", "command=[./train.py]"), 2, "name its interpreter: 'command=[python, ./train.py]'"),
        (("torchrun-script", "command=[python,", "train.py,", "--epochs,", "3]"), 2,
         "and quote values that contain spaces; see `orch submit -h`"),
        (("mine.yaml", "-tag", "x"), 2, "Did you mean --tag?"),
    ],
)  # fmt: skip
def test_hints_of_submit(orch: Type, words: tuple[str, ...], code: int, hint: str) -> None:
    said = orch("submit", *words, "--dry-run")
    assert (said.code, unquoted(hint) in unquoted(said.err)) == (code, True), said.err


def unquoted(text: str) -> str:
    """Return a text without quotes, which releases of click set around options or not."""
    return text.replace("'", "")


def test_hinted_commands_work(orch: Type) -> None:
    for words in (
        ("./mine.yaml",), ("mine.yaml", "workload.path=[.]"), ("torchrun-script", "command=[python, train.py]"),
        ("torchrun-script", "command=[python, ./train.py]"), ("mine.yaml", "--tag", "x"),
    ):  # fmt: skip
        assert orch("submit", *words, "--dry-run").code == 0


@pytest.mark.parametrize("words", [("rm",), ("ckpt", "rm"), ("ckpt", "delete")])
def test_one_checkpoint_is_not_deleted_by_hand(orch: Type, seeds: Seeds, words: tuple[str, ...]) -> None:
    said = orch(*words, f"{seeds.run()}@60")
    assert said.code in (2, 3)
    assert "orch rm tiny-1" not in said.err


@pytest.fixture(autouse=True)
def here_of_slips(home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("train.py", "x = 1\n"),
        ("my train.py", "x = 1\n"),
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
        ("gone.py", 3, "presets: demo, slurm-first-run, tiny-gpt, torchrun-script"),
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


def test_near_include_is_offered(orch: Type) -> None:
    assert "did you mean cluster/local?" in orch("config", "validate", "inc.yaml").err


@pytest.mark.parametrize(
    ("file", "where"), [("empty.yaml", "empty.yaml, which is empty"), ("nodata.yaml", "nodata.yaml\n")]
)
def test_config_without_data_names_file(orch: Type, tmp_path: Path, file: str, where: str) -> None:
    said = orch("config", "validate", file)
    assert said.code == 2
    assert f"not set in {tmp_path}/{where}" in said.err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (
            ("submit", "tiny-gpt", "--steps", "5"),
            "type configuration keys without dashes (KEY=VALUE), and quote values",
        ),
        (("resume", "tiny-1", "--batch-size", "8"), "spaces; see `orch resume -h`\n"),
        (("submit", "tiny-gpt", "--dry-rum"), "Did you mean --dry-run?"),
        (("status", "--steps", "5"), "see `orch status -h`\n"),
        (("logs", "tiny-1", "--tail", "10k"), "'10k' is not a whole number\n"),
        (("wait", "tiny-1", "--timeout", "soon"), "type seconds (60), or a number with s, m, h or d (1m)\n"),
    ],
)
def test_an_unknown_option(orch: Type, words: tuple[str, ...], offered: str) -> None:
    said = orch(*words)
    assert said.code == 2
    assert unquoted(offered) in unquoted(said.err)


@pytest.mark.parametrize("timeout", ["1m", "60"])
def test_a_time_may_have_a_unit(orch: Type, seeds: Seeds, timeout: str) -> None:
    assert orch("wait", "tiny-1", "--timeout", timeout).code == 3  # no such run: the time was understood


def test_a_run_where_a_configuration_is_asked_for(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    said = orch("config", "show", run)
    assert said.code == 3
    assert f"{run} is a run, not a preset or file" in said.err
    assert f"  orch show {run}   orch resume {run}   or a new run:  orch submit --from {run}\n" in said.err


def test_command_to_train_on_tokens(orch: Type, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 2000)
    said = orch("data", "prepare", "text.txt", "--out", "tokens").err
    assert said.rstrip().endswith("train on them with  data.path=tokens '~data.text'")
    assert orch("config", "validate", "tiny-gpt", "data.path=tokens", "~data.text").code == 0


def test_rebuild_warns_of_missing_folders(orch: Type, seeds: Seeds, tmp_path: Path) -> None:
    seeds.run()
    seeds.drop_lease()
    (tmp_path / "other").mkdir()
    said = orch("db", "rebuild", "--root", tmp_path / "other").err
    assert f"known runs are in folders that were not named; to include them, add --root {seeds.root}\n" in said


def test_run_left_out_of_named_folder(orch: Type, seeds: Seeds, caplog: pytest.LogCaptureFixture) -> None:
    run = seeds.run()
    seeds.drop_lease()
    (seeds.root / run).mkdir(exist_ok=True)
    (seeds.root / run / "run.json").write_text("{")
    said = orch("db", "rebuild", "--root", seeds.root).err
    assert f"skipped {seeds.root / run}" in caplog.text
    assert "not named" not in said


def test_no_resume_is_offered_without_folder(orch: Type, seeds: Seeds) -> None:
    run = seeds.run(state=RunState.SUCCEEDED)
    assert f"go on:    orch resume {run}" in orch("show", run).err
    shutil.rmtree(seeds.root / run)
    said = orch("show", run).err
    assert "folder" in said
    assert "go on:" not in said


def test_unknown_digest(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    for digest in ("90ff", "abcdef123456"):
        said = orch("config", "diff", digest, run)
        assert said.code == 3
        assert "; or name a run, or give 6 or more digits of a digest from `orch show RUN`" in said.err
