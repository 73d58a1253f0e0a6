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


@pytest.mark.parametrize("first", ["mine.yaml", "tiny-gpt", "mine"])
def test_an_import_in_the_wrong_order_is_told_the_right_one(orch: Type, first: str) -> None:
    said = orch("ckpt", "import", first, "weights", "optimizer.lr=1", "--dry-run")
    assert said.code == 2
    assert "the weights come first, then the configuration" in said.err
    assert f"  orch ckpt import weights {first} optimizer.lr=1 --dry-run\n" in said.err


def test_weights_that_are_missing_are_not_taken_for_a_configuration(orch: Type) -> None:
    said = orch("ckpt", "import", "weihgts", "mine.yaml")
    assert said.code == 3
    assert "weihgts does not exist" in said.err


def test_a_run_does_not_begin_with_an_export_but_imports_it(orch: Type) -> None:
    said = orch("submit", "mine.yaml", "--from", "weights", "optimizer.lr=1", "--weights-only", "--wait")
    assert said.code == 2
    assert "weights has exported weights, not a run's checkpoint" in said.err
    assert said.err.endswith("  `orch ckpt import weights CONFIG` begins a run with its weights\n")


@pytest.mark.parametrize("more", [(), ("--weights-only",)])
def test_a_run_s_folder_is_no_checkpoint_and_its_name_is_one(orch: Type, seeds: Seeds, more: tuple[str, ...]) -> None:
    run = seeds.run()
    folder = seeds.root / run
    (folder / "checkpoints").mkdir()
    (folder / "config.json").write_text("{}")
    said = orch("submit", "--from", folder, *more)
    assert said.code == 2
    assert f"{folder} is a run's folder, not a checkpoint's" in said.err
    assert f"write {run}, or {run}@latest" in said.err


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


def test_a_script_that_is_mistyped_is_offered_as_it_is_submitted(orch: Type) -> None:
    said = orch("submit", "trian.py")
    assert said.code == 3
    assert "did you mean train.py?\n" in said.err


def test_a_run_is_resumed_or_branched_and_not_submitted(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    said = orch("submit", run, "optimizer.lr=1")
    assert said.code == 3
    assert f"{run} is a run, not a preset or file" in said.err
    assert f"orch resume {run} optimizer.lr=1 " in said.err
    assert f"orch submit --from {run} optimizer.lr=1\n" in said.err


def test_the_beginning_of_a_run_s_name_is_a_file_first(orch: Type, seeds: Seeds) -> None:
    seeds.run("mine")
    assert "did you mean mine.yaml?" in orch("submit", "mine").err


@pytest.mark.parametrize("below", ["", "/", "/checkpoints/step-00000050.001-0123abcd"])
def test_a_run_is_named_by_its_name_and_not_by_its_folder(orch: Type, seeds: Seeds, below: str) -> None:
    run = seeds.run()
    said = orch("status", f"{seeds.root / run}{below}")
    assert said.code == 3
    assert "is a path, and the name of a run is needed" in said.err
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


def test_a_method_that_nobody_calls_is_told_by_whoever_looks_at_the_configuration(orch: Type, here: Path) -> None:
    (here / "my_model.py").write_text(MODEL + "    def buidl_data(self, layout): ...\n")
    for words in (("config", "validate", "mine.yaml"), ("submit", "mine.yaml", "--dry-run")):
        said = orch(*words)
        assert said.code == 0
        assert "orch never calls Mine.buidl_data(): did you mean build_data()?" in said.err
    assert [each["code"] for each in orch("config", "validate", "mine.yaml", "--json").answer["warnings"]]


@pytest.mark.parametrize("word", ["kill", "run", "ls", "delete", "stop", "start"])
def test_a_word_of_other_programs_is_not_answered_with_a_harmful_verb(orch: Type, word: str) -> None:
    """`kill` is spelled like `drill`, which injects a fault; `orch stop RUN` must not stop the controller."""
    said = orch(word, "tiny-1")
    assert (said.code, said.err.splitlines()[-1].strip()) == (2, "see `orch -h`"), said.err
    assert not {"drill", "rm", "controller"} & {*re.findall(r"did you mean `(.*?)`", said.err)}


def test_a_tag_that_no_run_has_is_told_with_those_that_there_are(orch: Type, seeds: Seeds) -> None:
    first, second = seeds.run(), seeds.run()
    orch("tag", first, "baseline", "slow")
    listed = orch("status", "-t", "baselin")
    assert listed.code == 0
    assert "no run has the tag baselin; did you mean baseline?  tags: baseline, slow" in listed.err
    assert "no run has the tag" not in orch("status", "-t", "slow", "--state", "HELD").err
    compared = orch("compare", "-t", "baselin")
    assert compared.code == 2
    assert "no run has the tag baselin; did you mean baseline?  tags: baseline, slow,  `orch compare" in compared.err
    assert f"`orch compare {first} {second}`" in compared.err


def test_a_comparison_is_offered_with_runs_that_there_are(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    assert "there is no other run" in orch("compare", run).err
    first, last = seeds.run(), seeds.run()
    assert f"  `orch compare {last} {run}`\n" in orch("compare", run).err
    assert f"  `orch compare {first} {last}`\n" in orch("compare").err


def test_what_show_offers_to_compare_with_is_the_run_before(orch: Type, seeds: Seeds) -> None:
    first = seeds.run()
    same = seeds.run()
    assert "orch config diff" not in orch("show", first).out
    assert "orch config diff" not in orch("show", same).out
    seeds.digest = seeds.store.put_config({"name": "tiny", "train": {"steps": 300}})
    other, third = seeds.run("other"), seeds.run()
    assert "orch config diff" not in orch("show", other).out
    assert f"   orch config diff {same} {third}\n" in orch("show", third).out
    assert "train.steps" in orch("config", "diff", same, third).out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("--cluster", "slrum"), "'slrum' is not one of 'auto', 'local', 'slurm'"),
        (("cluster=nope",), "available: cluster/local, cluster/slurm-a100-4"),
        (("model=tiny",), "`includes: [model/"),
        (("checkpoint=5",), "keys in `checkpoint`: "),
    ],
)
def test_a_preset_is_included_and_not_typed_as_a_value(orch: Type, words: tuple[str, ...], offered: str) -> None:
    said = orch("submit", "tiny-gpt", *words)
    assert said.code == 2
    assert offered in said.err


def test_two_sources_of_data_are_told_with_what_a_shell_takes(orch: Type, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 2000)
    orch("data", "prepare", "text.txt", "--out", "tokens")
    said = orch("config", "validate", "tiny-gpt", "data.path=tokens", "data.text=[text.txt]").err
    for words in ("'~data.text'", "'~data.path'"):
        assert words in said
        typed = ("data.path=tokens", "data.text=[text.txt]", *shlex.split(words))
        assert orch("config", "validate", "tiny-gpt", *typed).code == 0


def test_a_long_reason_is_cut_in_lists_and_whole_in_show(orch: Type, seeds: Seeds) -> None:
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


def test_a_state_is_no_run(orch: Type, seeds: Seeds) -> None:
    seeds.run()
    said = orch("status", "running")
    assert said.code == 3
    assert "`orch status --state RUNNING` lists" in said.err
    assert "one of CREATED, QUEUED, RUNNING" in orch("status", "--state", "zzz").err


def test_a_step_is_named_after_an_at(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    assert f"did you mean {run}@20?" in orch("ckpt", "verify", f"{run}:20").err


@pytest.mark.parametrize("verb", ["submit", "submit --dry-run", "submit --print-sbatch", "config validate"])
def test_a_script_that_is_not_there_is_told_by_whoever_looks(orch: Type, here: Path, verb: str) -> None:
    said = orch(*verb.split(), "torchrun-script", "command=[python, trian.py]")
    assert said.code == 2
    assert f"command: no file {here}/trian.py" in said.err
    assert "did you mean 'command=[python, train.py]'?" in said.err


def test_the_nearest_fault(orch: Type, seeds: Seeds) -> None:
    said = orch("drill", seeds.run(), "kill-rnak")
    assert (said.code, "did you mean kill-rank?" in said.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("./mine.yml/",), 3, "did you mean ./mine.yaml?"),
        (("mine.yaml", "workload.path=my_model.py"), 2, "write a list: 'workload.path=[A, B]'"),
        (("torchrun-script", "command=[train.py]"), 2, "name what starts it: 'command=[python, train.py]'"),
        (("torchrun-script", "command=[./train.py]"), 2, "name what starts it: 'command=[python, ./train.py]'"),
        (("torchrun-script", "command=[python,", "train.py,", "--epochs,", "3]"), 2,
         "and quote values that contain spaces; see `orch submit -h`"),
        (("mine.yaml", "-tag", "x"), 2, "Did you mean '--tag'?"),
    ],
)  # fmt: skip
def test_a_slip_is_told_with_what_is_meant(orch: Type, words: tuple[str, ...], code: int, hint: str) -> None:
    said = orch("submit", *words, "--dry-run")
    assert (said.code, hint in said.err) == (code, True), said.err


def test_what_a_slip_is_told_works(orch: Type) -> None:
    for words in (
        ("./mine.yaml",), ("mine.yaml", "workload.path=[.]"), ("torchrun-script", "command=[python, train.py]"),
        ("torchrun-script", "command=[python, ./train.py]"), ("mine.yaml", "--tag", "x"),
    ):  # fmt: skip
        assert orch("submit", *words, "--dry-run").code == 0


@pytest.mark.parametrize("words", [("rm",), ("ckpt", "rm"), ("ckpt", "delete")])
def test_one_checkpoint_is_not_deleted_by_hand(orch: Type, seeds: Seeds, words: tuple[str, ...]) -> None:
    """The answer must not be the command that removes the whole run."""
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
        (
            ("submit", "tiny-gpt", "--steps", "5"),
            "type configuration keys without dashes (KEY=VALUE), and quote values",
        ),
        (("resume", "tiny-1", "--batch-size", "8"), "spaces; see `orch resume -h`\n"),
        (("submit", "tiny-gpt", "--dry-rum"), "Did you mean '--dry-run'?"),
        (("status", "--steps", "5"), "see `orch status -h`\n"),
        (("logs", "tiny-1", "--tail", "10k"), "'10k' is not a whole number\n"),
        (("wait", "tiny-1", "--timeout", "soon"), "type seconds (60), or a number with s, m, h or d (1m)\n"),
    ],
)
def test_an_unknown_option(orch: Type, words: tuple[str, ...], offered: str) -> None:
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
    assert f"{run} is a run, not a preset or file" in said.err
    assert f"  orch show {run}   orch resume {run}   or a new run:  orch submit --from {run}\n" in said.err


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
    assert "1 known runs are in folders that were not named; to include them: orch db rebuild --root " in said
    assert f"--root {tmp_path / 'other'} --root {seeds.root}" in said


def test_run_left_out_of_named_folder(orch: Type, seeds: Seeds, caplog: pytest.LogCaptureFixture) -> None:
    run = seeds.run()
    lease = seeds.store.lease()
    assert lease is not None
    seeds.store.drop_lease(lease)
    (seeds.root / run).mkdir(exist_ok=True)
    (seeds.root / run / "run.json").write_text("{")
    said = orch("db", "rebuild", "--root", seeds.root).err
    assert f"skipped {seeds.root / run}" in caplog.text
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
        assert "; or name a run, or give 6 or more digits of a digest from `orch show RUN`" in said.err
