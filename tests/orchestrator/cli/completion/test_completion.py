"""Shell completion: what is offered where, and that real shells complete it."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest

from orchestrator.cli import main
from orchestrator.cli.completion.candidates import answer
from orchestrator.cli.completion.completion import SHELLS
from orchestrator.cli.terminal.argument_types import CompletedText
from orchestrator.cli.terminal.render import plain
from orchestrator.states import RunState
from tests.orchestrator.cli.conftest import Patch, Seeds, Type

FREE_TEXT = {
    "submit name", "ckpt import name", "ckpt pin note", "ckpt restore-test layouts", "ckpt restore-test tier",
    "logs rank", "events start", "nodes exclude why", "sweep axes", "sweep name", "debug limit",
    "data prepare field",
}  # fmt: skip
"""What nobody can know before it is typed."""


@pytest.fixture
def runs(orch: Type, seeds: Seeds) -> list[str]:
    names = [seeds.run(state=state) for state in (RunState.RUNNING, RunState.HELD, RunState.SUCCEEDED)]
    for step in (50, 100):
        seeds.checkpoint(names[2], step)
    orch("tag", names[2], "sweep")
    seeds.store.saw_node("gpu7", "slurm", epoch=seeds.epoch, now=1.0)
    return names


def offered(line: str) -> list[str]:
    found = [candidate.split("\t") for candidate in answer(main.orch, line)]
    return [f"<{kind}>" if kind == "file" else value + ("…" if kind == "open" else "") for kind, value, _ in found]


OFFERED = {
    "orch sub": ["submit"],
    "orch --json st": ["status"],
    "orch ckpt v": ["verify"],
    "orch logs --fo": ["--follow"],
    "orch show ": ["tiny-3", "tiny-2", "tiny-1"],
    "orch status tiny-1 tiny-3 ": ["tiny-2"],
    "orch top ": ["tiny-1"],
    "orch cancel ": ["tiny-2", "tiny-1"],
    "orch rm ": ["tiny-3", "tiny-2"],
    "orch resume tiny-2 optimizer.warm": ["optimizer.warmup_steps=…"],
    "orch ckpt pin tiny-3@": ["tiny-3@latest", "tiny-3@100", "tiny-3@50"],
    "orch ckpt unpin tiny-3@": ["tiny-3@100", "tiny-3@50"],
    "orch ckpt pin tin": ["tiny-3…", "tiny-2…", "tiny-1…"],
    "orch submit --from tiny-3@1": ["tiny-3@100"],
    "orch submit tiny": ["tiny-gpt"],
    "orch submit model/sm": ["model/small"],
    "orch submit ./my": ["<file>"],
    "orch submit tiny-gpt cluster.ki": ["cluster.kind=…"],
    "orch submit tiny-gpt restore": ["restore_tests.…"],
    "orch submit tiny-gpt ~optimizer.lr": ["~optimizer.lr"],
    "orch submit tiny-gpt cluster.kind=": [f"cluster.kind={word}" for word in ("auto", "local", "slurm")],
    "orch submit tiny-gpt data.shuffle=f": ["data.shuffle=false"],
    "orch submit tiny-gpt cluster.root=": ["<file>"],
    "orch submit tiny-gpt optimizer.lr=": ["optimizer.lr=0.003"],
    "orch submit tiny-gpt nothing.here=": [],
    "orch submit -t ": ["sweep"],
    "orch tag tiny-1 +sw": ["+sweep"],
    "orch status --state he": ["held"],
    "orch status --state HE": ["held"],
    "orch nodes release g": ["gpu7"],
    "orch drill ": ["tiny-1"],
    "orch drill tiny-1 kill-r": ["kill-rank"],
    "orch drill --demo kill-r": ["kill-rank"],
    "orch config diff tiny-3 tiny-g": ["tiny-gpt"],
    "orch completion z": ["zsh"],
    "orch nothing ": [],
    "orch 'sho": ["show"],
    "orch": main.orch.list_commands(click.Context(main.orch)),
}


def test_what_is_offered(runs: list[str]) -> None:
    # Older releases of click offer choices as they are written, in capitals.
    assert {line: [word.replace("HELD", "held") for word in offered(line)] for line in OFFERED} == OFFERED


def test_the_best_checkpoint_is_offered_where_the_run_chooses_one(orch: Type, seeds: Seeds) -> None:
    best = {"checkpoint": {"best": {"metric": "val_loss"}}}
    seeds.store.create_run(
        replace(seeds.new("best"), config_digest=seeds.store.put_config(best)), now=1.0, nonce="0123abcd"
    )
    seeds.checkpoint("best-1", 50)
    assert offered("orch ckpt export best-1@") == ["best-1@latest", "best-1@best", "best-1@50"]
    assert offered("orch ckpt verify best-1@") == ["best-1@latest", "best-1@best", "best-1@all", "best-1@50"]
    assert offered("orch submit --from best-1@b") == ["best-1@best"]
    assert offered("orch ckpt unpin best-1@") == ["best-1@50"]


def test_completion_without_registry(home: Path) -> None:
    assert (offered("orch show "), offered("orch ckpt ls x"), offered("orch submit -t ")) == ([], [], [])
    home.mkdir(exist_ok=True)
    (home / "registry.db").write_text("this is no registry")
    assert offered("orch show ") == []


def test_tab_without_state(home: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ORCH_HOME", "/dev/null")
    monkeypatch.setenv("_ORCH_COMPLETE", "orch show t")
    monkeypatch.setattr(main, "prepare", lambda: None)  # it would take over the streams of the tests
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr() == ("", "")


def test_every_argument_is_completed_or_free_text(runs: list[str]) -> None:
    from orchestrator.cli.completion.candidates import find_source

    silent = set()
    for verb in main.verbs():
        context = click.Context(main.orch, info_name="orch", help_option_names=["-h", "--help"])
        command: click.Command = main.orch
        for word in verb.split():
            assert isinstance(command, click.Group)
            found = command.get_command(context, word)
            assert found is not None
            command, context = found, click.Context(found, info_name=word, parent=context)
        texts = [item for item in command.params if isinstance(item.type, CompletedText)]
        silent |= {f"{verb} {item.name}" for item in texts if find_source(context, str(item.name)) is None}
    assert silent == FREE_TEXT


def test_a_tab_loads_nothing_heavy(runs: list[str]) -> None:
    code = (
        "import sys; from orchestrator.cli import main\n"
        "for line in ('orch s', 'orch top ', 'orch ckpt pin tiny-3@', 'orch submit tiny-gpt train.l'):\n"
        "    main._complete(line)\n"
        "heavy = {'torch', 'omegaconf', 'submitit', 'rich', 'sqlalchemy', 'fsspec'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_printed_whole(orch: Type, shell: str) -> None:
    script = Path(main.__file__).with_name("completion") / f"orch.{shell}"
    assert orch("completion", shell).out == script.read_text()
    assert orch("completion", shell, "--json").data == {"shell": shell, "script": script.read_text()}
    assert orch("completion", "tcsh").code == 2


# -- real shells


@pytest.fixture
def program(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "orch").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m orchestrator.cli.main "$@"\n')
    (folder / "orch").chmod(0o755)
    for name, value in {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "vt100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PS1", "READY> ")


class Shell:
    def __init__(self, command: list[str], setup: str) -> None:
        self._terminal, machine = pty.openpty()
        self._process = subprocess.Popen(command, stdin=machine, stdout=machine, stderr=machine, start_new_session=True)
        os.close(machine)
        self._type(f'{setup}; echo SET""UP\r')
        self._until(r"SETUP.*READY> ")

    def words_typed(self, keys: str) -> list[str]:
        self._type(f"{keys}\x01printf '[%s]' \r")
        return self._until(r"((?:\[[^][%]*\])+)\s*READY> ").strip("[]").split("][")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def _type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def _until(self, pattern: str) -> str:
        said, deadline = "", time.monotonic() + 120
        while not (found := re.search(pattern, said, re.DOTALL)):
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the shell says {said!r}"
            said += plain(os.read(self._terminal, 65536).decode(errors="replace"))
        return found[1] if found.groups() else ""


TYPED = {
    "orch stat\t": ["orch", "status"],
    "orch ckpt pin tiny-3@\t1\t": ["orch", "ckpt", "pin", "tiny-3@100"],
    "orch submit tiny-gpt optimizer.warm\t5": ["orch", "submit", "tiny-gpt", "optimizer.warmup_steps=5"],
    "orch submit tiny-gpt data.shuffle=f\tx": ["orch", "submit", "tiny-gpt", "data.shuffle=false", "x"],
    "orch submit ./mi\t": ["orch", "submit", "./mine.yaml"],
}
STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ""),
    "zsh": (["zsh", "-f", "-i"], "bindkey -e; unsetopt PROMPT_SP; autoload -U compinit; compinit -u -D; "),
}


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_a_real_shell_completes(runs: list[str], program: None, tmp_path: Path, monkeypatch: Patch, name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    (tmp_path / "mine.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    command, before = STARTS[name]
    shell = Shell(command, f'{before}eval "$(orch completion {name})"')
    try:
        assert {keys: shell.words_typed(keys) for keys in TYPED} == TYPED
    finally:
        shell.close()


def test_fish_completes(runs: list[str], program: None, tmp_path: Path, monkeypatch: Patch) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (tmp_path / "mine.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    lines = ("orch stat", "orch ckpt pin tiny-3@5", "orch submit ./mi")
    script = "; ".join(["orch completion fish | source", *(f"complete -C '{line}'" for line in lines)])
    done = subprocess.run(["fish", "-N", "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert [value.split("\t")[0] for value in done.stdout.splitlines()] == ["status", "tiny-3@50", "./mine.yaml"]
