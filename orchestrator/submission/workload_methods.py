"""Methods of a workload whose names are nearly those that orch calls: nobody would ever call them."""

import ast
from pathlib import Path

from orchestrator.config.run_config import RunConfig
from orchestrator.near_words import nearest

REQUIRED = ("build_model", "loss")
OPTIONAL = (
    "build_data", "build_optimizer", "build_scheduler", "load_state_dict", "metrics", "parallelize", "state_dict",
    "validate",
)  # fmt: skip
_NEAR = 0.82
_OURS = ("orch", "trainer.worker.workload")


def near_methods(config: RunConfig) -> list[str]:
    """What to say of each such method; only of a class that can be read without importing anything."""
    module, _, name = config.workload.target.partition(":")
    files = [Path(folder).expanduser() / f"{module.replace('.', '/')}.py" for folder in config.workload.path]
    file = next((file for file in files if file.is_file()), None)
    if config.command or file is None:
        return []
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return [
        f"orch never calls {name}.{typed}(): did you mean {meant}()? ({file}:{line})"
        for kind in kinds[-1:]
        for typed, meant, line in _slips(kind, tree)
    ]


def missing_method(kind: ast.ClassDef, tree: ast.Module) -> tuple[str, str] | None:
    """A method that the class needs and nothing gives it, with the one that is named nearly so; None if it may work.

    Only of a class that is derived from BaseWorkload alone.
    """
    ours = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in _OURS
        for alias in node.names
        if alias.name == "BaseWorkload"
    }
    bases = [ast.unparse(base) for base in kind.bases]
    if len(bases) != 1 or bases[0] not in {*ours, "orch.BaseWorkload"} or kind.keywords or kind.decorator_list:
        return None
    named = _named(tree)
    if {"setattr", "__getattr__", "__getattribute__", "__dict__", "globals"} & named:
        return None
    typed = {meant: typed for typed, meant, _ in _slips(kind, tree)}
    return next(((need, typed.get(need, "")) for need in REQUIRED if need not in named), None)


def _slips(kind: ast.ClassDef, tree: ast.Module) -> list[tuple[str, str, int]]:
    """Methods that nothing in the file names, what each is nearly called, and their lines."""
    own = {node.name: node.lineno for node in kind.body if isinstance(node, ast.FunctionDef)}
    used = _used(tree)
    found = []
    for typed, line in own.items():
        near = nearest(typed, [*REQUIRED, *OPTIONAL], _NEAR)
        if near and typed not in used and near not in own and not typed.startswith("_"):
            found.append((typed, near, line))
    return found


def _used(tree: ast.Module) -> set[str]:
    """Every attribute, name and text of a file: what its own code may call a method by."""
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return words | {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def _named(tree: ast.Module) -> set[str]:
    """The same, with all that it defines and imports."""
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias)
    return _used(tree) | {node.name for node in ast.walk(tree) if isinstance(node, defined)}
