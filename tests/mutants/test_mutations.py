"""The bugs that are planted, and those excluded by rule."""

import ast

import pytest

from tests.mutants.areas import AREAS, ROOT, sources, test_files
from tests.mutants.mutations import mutants

test_files.__test__ = False  # type: ignore[attr-defined]


def planted(source: str) -> set[str]:
    """Return the line of each bug with the bug in it."""
    return {one.planted(source).splitlines()[one.line - 1].strip() for one in mutants("x.py", source)}


@pytest.mark.parametrize(
    ("source", "bugs"),
    [
        ("a = b < c", {"a = b <= c", "a = b >= c"}),
        ("a = b is not c", {"a = b is c"}),
        ("a = (b) in (c)", {"a = (b) not in (c)"}),
        ("a = b and not c", {"a = b or not c", "a = b and (c)"}),
        ("a = b + c", {"a = b - c"}),
        ("a = 3", {"a = 4", "a = 2"}),
        ("a = 100", {"a = 200", "a = 50"}),
        ("a = 0.5", {"a = 1.0", "a = 0.25"}),
        ("a = True", {"a = False"}),
        ("a = max(b, c)", {"a = min(b, c)"}),
        ("a = f(b, c)", {"a = f(c, b)"}),
        ("a += b", {"a -= b", "pass"}),
        ("a.b = c", {"pass"}),
        ("f()", {"pass"}),
        ("raise AError(a + 1, b < c)", {"pass"}),
        ("a = b if c else d", {"a = b if (not c) else d"}),
        ("def f():\n    return a", {"return None"}),
        ("for a in b:\n    continue", {"pass"}),
        ("def f():\n    return False", {"return True"}),
        ('if device.type == "cuda":\n    f()\nelse:\n    g(a + b)', {"pass", "g(a - b)"}),
        ("a = f(b, c) if a.is_cuda else d + e", {"a = f(b, c) if a.is_cuda else d - e"}),
    ],
)
def test_a_bug_is_a_small_edit(source: str, bugs: set[str]) -> None:
    assert planted(source) == bugs


@pytest.mark.parametrize(
    "source",
    [
        '"""One < two."""', "a: int | None", "def f(a: x[1]) -> y[1]: ...", "@dataclass(frozen=True)\nclass A: ...",
        "assert a == 1", 'a = f"{b + 1}"', "_log.error(a, b)",
        "def __repr__(self):\n    return a + 1", '__all__ = ["a", "b"]', "if TYPE_CHECKING:\n    f()",
        'if device.type == "cuda":\n    f()', "a = isinstance(b, c)", 'a = "b" + c', "def f():\n    return None",
        "class A(Protocol):\n    b = 1", "import a.b",
    ],
)  # fmt: skip
def test_changes_without_effect_are_left_out(source: str) -> None:
    assert planted(source) == set()


def test_every_bug_compiles_and_is_another_program() -> None:
    source = (ROOT / "tests/mutants/mutations.py").read_text()
    whole = ast.dump(ast.parse(source))
    found = mutants("mutations.py", source)
    assert len(found) > 50
    for one in found:
        assert ast.dump(ast.parse(one.planted(source))) != whole, one.name


def test_every_area_has_code_and_tests() -> None:
    for area in AREAS:
        for source in sources(area):
            assert test_files(source), source
