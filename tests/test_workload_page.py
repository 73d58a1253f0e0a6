"""docs/writing-a-workload.md names every method of a workload with its parameters."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "writing-a-workload.md"
SOURCE = ROOT / "trainer" / "worker" / "workload.py"


def methods(text: str, kinds: set[str]) -> dict[str, list[str]]:
    """Return the public methods of these classes, with their parameter names."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name in kinds]
    found = [node for kind in classes for node in kind.body if isinstance(node, ast.FunctionDef)]
    return {node.name: [one.arg for one in node.args.args] for node in found if node.name[0] != "_"}


def test_every_method_of_a_workload_is_on_its_page() -> None:
    (block,) = re.findall(r"^```python\n(class EveryMethod.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert methods(block, {"EveryMethod"}) == methods(SOURCE.read_text(), {"Workload", "BaseWorkload"})


def test_the_readme_leads_to_the_page_before_its_own_example() -> None:
    section = (ROOT / "README.md").read_text().partition("## Your own model\n")[2]
    assert "docs/writing-a-workload.md" in section.partition("```")[0]
