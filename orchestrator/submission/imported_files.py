"""Which files of its folders a program can import: what its modules name, from its own on, without running any."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

_DYNAMIC = frozenset({"import_module", "run_path", "run_module", "spec_from_file_location", "__import__"})
_BUILTINS = frozenset({"exec", "eval"})
"""Names with which code imports what no `import` statement says; `model.eval()` is none of them."""
MOST = 300
"""Modules that are read at most."""


def imported_names(folders: Sequence[Path], module: str) -> list[str] | None:
    """Dotted names that `module` and what it imports from these folders import, its own included.

    None where nobody can say: a module that cannot be read, or that imports by other means than `import`.
    """
    names, waiting = {module}, [module]
    read: set[Path] = set()
    while waiting:
        name = waiting.pop()
        for folder, file in [(place, file) for place in folders for file in _files_of(place, name)]:
            if file in read:
                continue
            read.add(file)
            try:
                tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError):
                return None
            if len(read) > MOST or any(map(_is_dynamic, ast.walk(tree))):
                return None
            new = set(_imports(tree, _package(folder, file))) - names
            names |= new
            waiting += new
    return sorted(names)


def is_imported(file: str, names: list[str]) -> bool:
    """Whether one of these dotted names is, or lies in, this file of the folder; other files than Python's may be."""
    path = Path(file)
    if path.suffix not in (".py", ".pyi"):
        return True
    parts = path.with_suffix("").parts
    dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return any(name == dotted or name.startswith(f"{dotted}.") for name in names)


def _files_of(folder: Path, name: str) -> Iterator[Path]:
    """The module's file, and those of the packages that it is in."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:depth])
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def _package(folder: Path, file: Path) -> list[str]:
    return list(file.parent.relative_to(folder).parts)


def _imports(tree: ast.AST, package: list[str]) -> Iterator[str]:
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
    if isinstance(node, ast.Attribute):  # who changes `sys.path` imports from other folders, too
        in_sys = isinstance(node.value, ast.Name) and node.value.id == "sys"
        return node.attr in _DYNAMIC or (in_sys and node.attr == "path")
    return False
