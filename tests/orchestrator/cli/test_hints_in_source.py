"""Every command that the source offers can be typed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestrator.cli.printed_commands import commands_in, is_name, why_not_typed

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = (("kind", "kill-rank"), ("layout", "same"), ("step", "20"), ("other", "slurm"), ("via|ways", "cron"))
"""What stands in a message for a value of this name; else the name of a run."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(_part(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.JoinedStr)):
            left += ast.iter_child_nodes(node)


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.FormattedValue)
    name = ast.unparse(node.value)
    # Most choices in a message are between a text and none.
    if isinstance(node.value, ast.IfExp):
        chosen = node.value.body
        return _part(chosen) if isinstance(chosen, ast.Constant) else "".join(map(_part, getattr(chosen, "values", [])))
    return next((sample for word, sample in SAMPLES if re.search(word, name)), "tiny-1")


def offered() -> list[tuple[str, list[str]]]:
    files = [
        path
        for package in ("orch", "orchestrator", "trainer", "checkpointing")
        for path in (ROOT / package).rglob("*.py")
    ]
    return [
        (f"{path.relative_to(ROOT)}:{line}", words)
        for path in sorted(files)
        if "orch " in path.read_text()  # most need not be parsed
        for line, text in texts(path)
        if "orch " in text
        for words in commands_in(text)
    ]


def test_every_command_in_a_message_is_understood() -> None:
    found = offered()
    assert len(found) > 100
    wrong = [
        f"{place}: orch {' '.join(words)}: {why}"
        for place, words in found
        if not is_name(words) and (why := why_not_typed(words))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("look:  orch show x   orch logs x --rank first-error", ["show x", "logs x --rank first-error"]),
        ("`orch ckpt ls RUN` lists them; orch resume x", ["ckpt ls RUN", "resume x"]),
        ("cancelled by `orch cancel`", ["cancel"]),
        ("an orch process, orch-agent, ~/.local/orch save", []),
        ("`orch wait RUN && orch submit ...`", ["wait RUN", "submit"]),
    ],
)  # fmt: skip
def test_where_a_command_begins_and_ends(text: str, found: list[str]) -> None:
    assert [" ".join(words) for words in commands_in(text)] == found


@pytest.mark.parametrize("command", ["kill x", "cancel", "ckpt ls x --bogus", "status lists the runs --now", "ckpt x"])
def test_a_command_that_cannot_be_typed_is_found(command: str) -> None:
    assert why_not_typed(command.split())
