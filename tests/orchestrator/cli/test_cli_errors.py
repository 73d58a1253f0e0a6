"""Bad input: one clear complaint with what, where and what to type, the right exit code, and nothing lost."""

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from checkpointing.storage.durable import NotAFile, read_json
from orchestrator.cli import main
from orchestrator.cli.runs import status
from orchestrator.config import compose, layers
from orchestrator.errors import ConfigError
from tests.orchestrator.cli.conftest import Patch, Seeds, Type

BAD_CONFIGS = {
    "unknown key": ("tiny-gpt", "train.stps=3", "did you mean `train.steps`"),
    "wrong type": ("tiny-gpt", "train.steps=many", "train.steps"),
    "no such preset": ("tiny-gp", "", "tiny-gpt"),
    "sizes that do not multiply": ("tiny-gpt", "parallel.tp=3", "parallel"),
    "no such file": ("./mine.yaml", "", "mine.yaml"),
}


@pytest.mark.parametrize("case", list(BAD_CONFIGS))
@pytest.mark.parametrize("verb", ["submit", "config validate", "config show"])
def test_bad_configuration(orch: Type, home: Path, tmp_path: Path, case: str, verb: str) -> None:
    source, override, word = BAD_CONFIGS[case]
    words = [*verb.split(), source, *([override] if override else [])]
    refused = orch(*words)
    assert refused.code in (2, 3), refused.err
    assert word in refused.err
    assert_three_parts(refused.err)
    assert refused.out == ""
    assert not (home / "registry.db").exists()
    as_json = orch(*words, "--json")
    assert as_json.code == refused.code
    error = as_json.answer["error"]
    assert as_json.answer["schema"] == "orch.error/1"
    assert list(error) == ["code", "message", "where", "hint"]
    assert error["message"]


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def assert_three_parts(text: str) -> None:
    first, *rest = text.rstrip().splitlines()
    assert first.startswith("error: ")
    assert rest, text
    assert all(line.startswith("  ") for line in rest), text
    assert "Traceback" not in text


def test_a_file_that_is_no_yaml(orch: Type, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("train: [1, 2\nname: x")
    refused = orch("config", "validate", path)
    assert refused.code == 2
    assert "broken.yaml" in refused.err
    assert_three_parts(refused.err)


def test_binary_config_file(orch: Type, tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x80")
    refused = orch("config", "validate", binary)
    assert refused.code == 2
    assert refused.err.endswith(f"  {binary}\n  name a text file of keys and values\n")


def test_unreadable_config_file(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "my run.yaml").touch()
    # Root may read a file of any mode.
    monkeypatch.setattr(Path, "read_text", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(ConfigError, match="cannot be read: Permission denied") as refused:
        layers.from_file(tmp_path / "my run.yaml")
    assert refused.value.hint == f"chmod u+r '{tmp_path}/my run.yaml'"


def test_no_slurm(orch: Type, home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = orch("submit", "tiny-gpt", "--cluster", "slurm", f"cluster.root={tmp_path}")
    assert refused.code == 4
    assert "Slurm" in refused.err
    assert "local" in refused.err
    assert orch("status", "--json").data == []


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (("statu",), "did you mean `status`"),
        (("ckpt", "verfy"), "did you mean `verify`"),
        (("controller", "restart"), "did you mean `start`"),
        (("frobnicate",), "no such command `frobnicate`"),
        (("sav",), "did you mean `save`"),
        (("submti",), "did you mean `submit`"),
        (("status", "--bogus"), "--bogus"),
        (("submit",), "CONFIG"),
        (("wait", "x", "--timeout", "soon"), "--timeout"),
        (("ckpt", "verify", "x", "--level", "5"), "--level"),
        (("submit", "tiny-gpt", "--cluster", "moon"), "moon"),
        (("controller", "install"), "--via"),
        (("logs", "x", "--rank", "some"), "first-error"),
        (("logs", "x", "--rank", "1", "--node", "0"), "pass only one of them"),
        (("data", "prepare", "", "--out", "tokens"), "PATHS is empty; type . for this folder"),
        (("data", "prepare", ".", "--out", ""), "--out is empty; type . for this folder"),
        (("demo", "--root", "", "train.steps=0"), "--root is empty"),
        (("drill", "--demo", "nan", "--root", "", "train.steps=0"), "--root is empty"),
        (("doctor", "--root", ""), "--root is empty"),
        (("db", "backup", ""), "FILE is empty"),
        (("db", "rebuild", ""), "ROOTS is empty"),
        (("ckpt", "export", "x", ""), "DIR is empty"),
        (("ckpt", "import", "", "demo"), "DIR|FILE is empty"),
        (("demo", "restor-test"), "did you mean `orch demo restore-test`?"),
        (("demo", "restore_tests"), "did you mean `orch demo restore-test`?"),
        (("demo", "nope"), "override #1: nope"),
        (("demo", "train.steps=0"), "override #1: train.steps=0"),
        (("demo", "restore-test", "train.steps=0"), "override #1: train.steps=0"),
        (("drill", "--demo", "nan", "train.steps=0"), "override #1: train.steps=0"),
        (("demo", "--root", "/etc/passwd"), "/etc/passwd is a file, and must be a folder"),
        (("demo", "restore-test", "--root", "/etc/passwd"), "/etc/passwd is a file, and must be a folder"),
        (("drill", "--demo", "nan", "--root", "/etc/passwd/x"), "/etc/passwd is a file, and must be a folder"),
        (("drill", "kil-rank", "live-1"), "no such fault: live-1"),
        (("events", "demo-1", "--tail", "5"), "No such option"),
        (("drill", "nan"), "orch drill RUN kill-rank"),
        (("ckpt", "gc", "demo-1", "--all"), "RUN and --all are mutually exclusive"),
        (("ckpt", "gc"), "no run is given"),
        (("ckpt", "restore-test", "x", "--layout", ","), "--layout names no layout"),
        (("ckpt", "restore-test", "x", "--layout", ""), "--layout names no layout"),
    ],
)
def test_a_command_line_that_is_wrong(orch: Type, words: tuple[str, ...], word: str) -> None:
    refused = orch(*words)
    assert refused.code == 2
    assert word in refused.err
    assert_three_parts(refused.err)
    assert orch(*words, "--json").answer["error"]["message"]


@pytest.mark.parametrize("words", [("shell", "tiny-1"), ("debug", "tiny-gpt")])
def test_an_interactive_verb_refuses_json(orch: Type, words: tuple[str, ...]) -> None:
    said = orch("--json", *words)
    error = said.answer["error"]
    assert (said.code, error["hint"]) == (2, "omit --json; the exit code is the command's too")
    assert f"the output of `orch {words[0]}` is the command's own" in error["message"]


def test_options_behind_two_dashes_are_not_those_of_orch(orch: Type) -> None:
    said = orch("shell", "no-such-run", "--", "nvidia-smi", "--json", "--debug")
    assert (said.code, said.out, "Traceback" in said.err) == (3, "", False)


@pytest.fixture
def no_account(monkeypatch: Patch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("no_account")
def test_unknown_home(orch: Type, home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    named = tmp_path / "none.yaml"
    named.write_text("")
    show = ("config", "show", "tiny-gpt", f"cluster.root={tmp_path}")
    assert orch(*show).code == 0, "XDG_CONFIG_HOME names the folder"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("ORCH_USER_CONFIG", str(named))
    assert orch(*show).code == 0
    refusals = [orch("config", "show", "tiny-gpt", "cluster.root=~/runs"), orch("config", "show", "~/mine.yaml")]
    monkeypatch.delenv("ORCH_USER_CONFIG")
    refusals.append(orch(*show))
    monkeypatch.delenv("ORCH_HOME")
    refusals.append(orch("status"))
    for refused in refusals:
        assert refused.code == 4, refused.err
        assert "your home folder is not known: HOME is not set, and uid" in refused.err
        assert "set HOME" in refused.err


def test_a_home_of_nobody_is_no_defect_of_orch(orch: Type) -> None:
    refused = orch("config", "show", "~no-such-account/mine.yaml")
    assert refused.code == 4
    assert "a path begins with ~NAME, and NAME has no account here" in refused.err


def test_internal_error(orch: Type, seeds: Seeds, home: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(status, "newest_runs", raising(ZeroDivisionError("a defect")))
    failed = orch("status")
    assert failed.code == 1
    assert "internal error: ZeroDivisionError: a defect" in failed.err
    assert "Traceback" not in failed.err
    assert str(home / "last-error.txt") in failed.err
    assert "in fail" in (home / "last-error.txt").read_text()
    assert "Traceback" in orch("status", "--debug").err
    assert json.loads(orch("status", "--json").out)["error"]["code"] == "Internal"


def test_an_error_of_the_file_system_is_no_defect(orch: Type, seeds: Seeds, monkeypatch: Patch) -> None:
    monkeypatch.setattr(status, "newest_runs", raising(OSError(28, "No space left on device", "/lustre/x")))
    failed = orch("status")
    assert failed.code == 4
    assert "No space left on device: /lustre/x" in failed.err


@pytest.mark.parametrize(
    ("place", "why", "verbs"),
    [
        ("/etc/passwd", "it is not a folder", ["status", "submit tiny-gpt", "doctor"]),
        ("/proc/orch", "No such file", ["submit tiny-gpt"]),
    ],
)
def test_bad_state(orch: Type, monkeypatch: Patch, place: str, why: str, verbs: list[str]) -> None:
    monkeypatch.setenv("ORCH_HOME", place)
    for words in map(str.split, verbs):
        said = orch(*words)
        assert said.code == 4
        assert f"the state folder cannot be created: {why}" in said.err + said.out
        assert f"ORCH_HOME={place}" in said.err + said.out


def test_doctor_names_a_state_folder_that_could_not_be_made(orch: Type, monkeypatch: Patch) -> None:
    monkeypatch.setenv("ORCH_HOME", "/proc/orch")
    said = orch("doctor")
    assert said.code == 4
    assert "state folder /proc/orch cannot be created in /proc: No such file" in said.out


def test_deleted_current_folder(orch: Type, home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = orch("config", "show", "./mine.yaml")
    assert (said.code, "if the current folder was deleted, cd to another one" in said.err) == (4, True)


def test_quiet_keeps_the_answer_and_the_errors(orch: Type, seeds: Seeds) -> None:
    seeds.run()
    assert orch("-q", "status").err == ""
    assert "tiny-1" in orch("status", "-q").out
    assert orch("-q", "show", "nobody").err.startswith("error:")


def test_main_exits_with_the_code(home: Path) -> None:
    # A program of its own: `main` takes over the standard streams.
    ended = subprocess.run([sys.executable, "-P", "-m", "orchestrator.cli.main", "show", "x"], capture_output=True)
    assert ended.returncode == 3


def test_saved_traceback_is_private(orch: Type, home: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(compose, "compose", raising(ZeroDivisionError("a defect")))
    home.mkdir()
    saved = home / "last-error.txt"
    saved.write_text("an older one")
    saved.chmod(0o644)
    typed = ["+env.A=hunter2", "env.B=hunter2\nhunter2", "env={C: hunter2}", "env.WORD=x=hunter2", "train.steps=7"]
    assert orch("submit", "tiny-gpt", *typed).code == 1
    kept = saved.read_text()
    assert "orch submit tiny-gpt +env.A=*** env.B=*** env=*** env.WORD=***" in kept
    assert "train.steps=7" in kept
    assert "hunter2" not in kept
    assert saved.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", ["nan", "inf", "1e400", "-inf"])
def test_infinite_seconds_are_refused(orch: Type, number: str) -> None:
    seen = []
    for verb in main.verbs():
        command: click.Command = main.orch
        for word in verb.split():
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), word)
            assert found is not None
            command = found
        for option in command.params:
            if isinstance(option.type, (click.types.FloatParamType, click.FloatRange)):
                seen.append(verb)
                with pytest.raises(click.BadParameter):
                    option.type.convert(number, option, click.Context(command))
    assert {"wait", "save", "attach", "top", "drill", "demo", "controller run"} <= {*seen}
    assert orch("wait", "x", "--timeout", number).code == 2


def test_size_limit_of_json_file(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text("[1]")
    assert read_json(path, most=1 << 60) == [1]  # so much memory nobody has
    with pytest.raises(NotAFile, match="larger than 2 bytes"):
        read_json(path, most=2)


def test_too_little_memory_is_no_defect_of_orch(orch: Type, seeds: Seeds, monkeypatch: Patch) -> None:
    monkeypatch.setattr(status, "newest_runs", raising(MemoryError()))
    told = orch("status")
    assert (told.code, told.err.splitlines()[0]) == (4, "error: not enough memory")
    assert "ulimit -v" in told.err


@pytest.mark.parametrize("words", [("status",), ("show",), ("resume",), ("events",), ("ckpt", "ls")])
def test_a_name_that_is_no_text_is_no_defect(orch: Type, seeds: Seeds, words: tuple[str, ...]) -> None:
    seeds.run()
    said = orch(*words, "caf\udce9")
    assert said.code in (2, 3)
    assert_three_parts(said.err)
    assert "internal" not in said.err


def test_pythonpath_hint(orch: Type, home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(compose, "compose", raising(AttributeError("module 'json' has no attribute 'loads'")))
    assert "this is a defect in orch" in orch("config", "show", "demo").err
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed = orch("config", "show", "demo")
    assert failed.code == 1
    assert "a module on PYTHONPATH may hide one of orch's: `unset PYTHONPATH`" in failed.err


def test_a_message_does_not_fill_the_screen(orch: Type, home: Path) -> None:
    said = orch("config", "show", "demo", f"name={'x' * 50_000}")
    assert said.code == 2
    assert len(said.err) < 10_000
    assert "characters)" in said.err


def _pipe(place: Path) -> str:
    os.mkfifo(place)
    return str(place)


def _link(place: Path) -> str:
    place.symlink_to("/nowhere/registry.db")
    return str(place)


def _circle(place: Path) -> str:
    place.symlink_to(place.name)
    return str(place)


@pytest.mark.parametrize(
    ("make", "code", "why"),
    [
        (_pipe, 6, "it is a pipe or a device"),
        (_link, 6, "it is a broken link"),
        (_circle, 6, "it is a broken link"),
        (lambda place: f"sqlite:///{place}", 2, "ORCH_REGISTRY must be a file name, not a URL"),
        (lambda place: f"file:{place}?mode=memory", 2, "ORCH_REGISTRY must be a file name, not a URL"),
    ],
)
def test_impossible_registry(
    orch: Type, tmp_path: Path, monkeypatch: Patch, make: Callable[[Path], str], code: int, why: str
) -> None:
    monkeypatch.setenv("ORCH_REGISTRY", make(tmp_path / "r.db"))
    for words in (("status",), ("submit", "demo")):
        said = orch(*words)
        assert (said.code, why in said.err) == (code, True)
        assert_three_parts(said.err)


def test_link_to_new_registry(orch: Type, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "r.db").symlink_to("later.db")
    monkeypatch.setenv("ORCH_REGISTRY", str(tmp_path / "r.db"))
    assert orch("status").code == 0
