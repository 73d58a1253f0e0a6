"""`import orch`: what it names, and what it does not load."""

import subprocess
import sys

import pytest

import orch
from orch import command_line

HEAVY = ("torch", "sqlalchemy", "click", "omegaconf", "submitit", "orchestrator", "trainer", "asyncio")


def test_every_name_is_there_and_none_is_listed_twice() -> None:
    assert set(orch.__all__) == {*orch._HOME_OF, "__version__"}
    assert len(orch.__all__) == len(set(orch.__all__)) == 1 + sum(map(len, orch._HOMES.values()))
    for name in orch.__all__:
        assert getattr(orch, name) is not None
    assert dir(orch) == sorted(orch.__all__)


def test_every_error_that_a_script_may_catch_is_named() -> None:
    assert {error.__name__ for error in command_line.PUBLIC_ERRORS} == set(orch._HOMES["orchestrator.errors"])


def test_a_name_that_is_not_there_says_which_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Submit'; did you mean orch.submit"):
        orch.Submit  # noqa: B018


def test_the_import_loads_nothing_heavy_and_each_side_only_its_own() -> None:
    def loaded(program: str) -> set[str]:
        code = f"import sys, orch; {program}; print(*[name for name in {HEAVY} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert loaded("pass") == set()
    assert loaded("orch.submit, orch.Run, orch.OrchError") == {"orchestrator"}
    # Packages of training import no others, see `test_imports_go_one_way`.
    for name in ("BaseWorkload", "Layout", "evaluating"):
        assert orch._HOME_OF[name].startswith("trainer.")


@pytest.mark.parametrize(
    ("typed", "meant"), [("sumbit", "submit"), ("Trainer", "BaseWorkload"), ("Submit", "submit"), ("Zonk", "")]
)
def test_a_name_that_is_not_there_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    said = f"did you mean orch.{meant}?" if meant else "it has BaseWorkload, "
    with pytest.raises(AttributeError) as asked:
        getattr(orch, typed)
    assert said in str(asked.value)
    with pytest.raises(ImportError) as imported:
        exec(f"from orch import {typed}")
    assert said in str(imported.value)
    assert not hasattr(orch, typed)


def test_a_module_of_ours_is_imported_as_before() -> None:
    done = subprocess.run([sys.executable, "-c", "from orch import runs, command_line"], check=False)
    assert done.returncode == 0
