"""Imports in the text of a file: module names, and whether it imports by other means than `import`."""

import ast
import re
from collections.abc import Iterator, Sequence

_DYNAMIC = frozenset({"import_module", "run_path", "run_module", "spec_from_file_location", "__import__"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_BUILTINS = frozenset({"exec", "eval"})
"""Names with which code imports what no `import` statement shows; `model.eval()` is not one of them."""
_WORDS = "|".join(sorted(_DYNAMIC | _BUILTINS | {r"sys\s*\.\s*path"})).encode()
_LATE = re.compile(rb"^[ \t]+(?:from|import)\s|[:;]\s*(?:from|import)\s|\b(?:%b)\b" % _WORDS, re.MULTILINE)


_PLAIN = re.compile(rb"^(?:from|import)[ \t]+(\w[^#\n]*)", re.MULTILINE)


def plain_imports(text: bytes) -> set[str]:
    """Return top-level names that `import` statements outside of functions name; quicker than `named_imports`."""
    parts = [part.split() for line in _PLAIN.findall(text) for part in line.partition(b" import")[0].split(b",")]
    return {part[0].partition(b".")[0].decode(errors="replace") for part in parts if part}


def has_late_imports(text: bytes) -> bool:
    """Whether a function may contain an import, which importing the module does not run."""
    return _LATE.search(text) is not None


def named_imports(text: bytes, package: Sequence[str], *, imported: bool = False) -> tuple[set[str], bool]:
    """Return the dotted names that a module of this package imports, and whether it may import others.

    A name may be a module or a member of one. `imported`: the code outside of functions has been run.
    Raises SyntaxError or ValueError for invalid Python.
    """
    tree = ast.parse(text)
    ahead = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)] if imported else [tree]
    return set(_imports(tree, package)), any(_is_dynamic(node) for part in ahead for node in ast.walk(part))


def _imports(tree: ast.AST, package: Sequence[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            yield from filter(None, [whole, *(f"{whole}.{alias.name}".lstrip(".") for alias in node.names)])


def _is_dynamic(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _DYNAMIC | _BUILTINS
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2] in _DYNAMIC
    if isinstance(node, ast.Attribute):  # a changed `sys.path` adds other folders
        in_sys = isinstance(node.value, ast.Name) and node.value.id == "sys"
        return node.attr in _DYNAMIC or (in_sys and node.attr == "path")
    return False
