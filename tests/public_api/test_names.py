"""`import orch`: what it names, and what it does not load."""

import subprocess
import sys

import pytest

import orch
from orch import command_line

HEAVY = ("torch", "sqlalchemy", "click", "omegaconf", "submitit", "orchestrator", "trainer", "asyncio")


def test_all_names() -> None:
    assert set(orch.__all__) == {*orch._HOME_BY_NAME, "__version__"}
    assert len(orch.__all__) == len(set(orch.__all__)) == 1 + sum(map(len, orch._HOMES.values()))
    for name in orch.__all__:
        assert getattr(orch, name) is not None
    assert dir(orch) == sorted(orch.__all__)


def test_public_errors() -> None:
    assert {error.__name__ for error in command_line.PUBLIC_ERRORS} == set(orch._HOMES["orchestrator.errors"])


def test_light_import() -> None:
    def loaded(program: str) -> set[str]:
        code = f"import sys, orch; {program}; print(*[name for name in {HEAVY} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert loaded("pass") == set()
    assert loaded("orch.submit, orch.Run, orch.OrchError") == {"orchestrator"}
    # Packages of training import no others, see `test_imports_go_one_way`.
    for name in ("BaseWorkload", "Layout", "evaluating"):
        assert orch._HOME_BY_NAME[name].startswith("trainer.")


@pytest.mark.parametrize(("typed", "meant"), [("sumbit", "submit"), ("Submit", "submit"), ("Zonk", "")])
def test_unknown_name(typed: str, meant: str) -> None:
    said = f"did you mean orch.{meant}?" if meant else "it has BaseWorkload, "
    with pytest.raises(AttributeError) as asked:
        getattr(orch, typed)
    assert said in str(asked.value)
    with pytest.raises(ImportError, match=f"cannot import name '{typed}' from 'orch'"):
        exec(f"from orch import {typed}")
    assert not hasattr(orch, typed)


def test_import_of_submodules() -> None:
    done = subprocess.run([sys.executable, "-c", "from orch import runs, command_line"], check=False)
    assert done.returncode == 0
