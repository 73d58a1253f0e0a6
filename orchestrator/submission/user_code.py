"""The user's code, looked at before anything is written: is it there, and does it bear a name of ours."""

import ast
import os
from importlib.machinery import PathFinder
from pathlib import Path

from orchestrator.config.near_files import near_module
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.near_words import did_you_mean, nearest
from orchestrator.submission.command_script import check_command
from orchestrator.submission.workload_methods import missing_method
from trainer.contract.user_code.import_search import ImportSearch, shadowing_file
from trainer.contract.user_code.record_code import named_tops

OURS = ("orch", "orchestrator", "trainer", "checkpointing")
"""Top-level names that always mean orch's own packages inside a job."""
_IMPORT_PATH = "PYTHONPATH"
_ROOT = Path(__file__).resolve().parents[2]


def check(config: RunConfig, beside: Path | None = None) -> None:
    """Raise ConfigError for code that a job could not import or start, or would import something else for.

    `beside`: the folder from which the run was submitted; this process's by default.
    """
    folders = [Path(folder).expanduser() for folder in config.workload.path]
    for folder in folders:
        _check_folder(folder)
    _check_import_path(config)
    if config.command:
        check_command(config, beside or Path.cwd())
    else:
        _check_target(config.workload.target, folders)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"workload.path: no folder {folder}", where="workload.path", hint="give an existing folder")
    if (taken := _of_our_name(folder)) is not None:
        raise ConfigError(
            f"{taken} has the name of one of orch's own packages, so a job could never import it",
            where="workload.path",
            hint=f"rename it, for example to my_{taken.name}, and its imports and workload.target with it",
        )


def _of_our_name(folder: Path) -> Path | None:
    """What of this folder Python would import by the name of one of our packages."""
    if folder.resolve() == _ROOT:
        return None
    for name in OURS:
        module, package = folder / f"{name}.py", folder / name
        if module.is_file():
            return module
        if package.is_dir() and any(package.glob("*.py")):
            return package
    return None


def _check_import_path(config: RunConfig) -> None:
    """Refuse a PYTHONPATH that the job is to get in which other packages stand before orch's own."""
    key = "env" if _IMPORT_PATH in config.env else "env_from"
    value = config.env.get(_IMPORT_PATH, os.environ.get(_IMPORT_PATH, "") if _IMPORT_PATH in config.env_from else "")
    for folder in filter(None, value.split(os.pathsep)):
        if (taken := _of_our_name(Path(folder))) is not None:
            raise ConfigError(
                f"{taken} has the name of one of orch's own packages, and the job's PYTHONPATH has it before those",
                where=f"{key}.{_IMPORT_PATH}" if key == "env" else f"{key}: {_IMPORT_PATH}",
                hint=f"rename it, or give PYTHONPATH without {folder}; workload.path=[FOLDER] comes after orch's own",
            )


def _check_target(target: str, folders: list[Path]) -> None:
    module, _, name = target.partition(":")
    top = module.partition(".")[0]
    places = [_ROOT] if top in OURS else folders
    if top not in OURS:
        _refuse_shadowed(target, top, folders)
    file = _file_of(module, places) or (None if top in OURS else _installed(module))
    if file is None:
        searched = ", ".join(str(place) for place in places) or "no folder (workload.path is empty)"
        raise ConfigError(
            f"workload.target={target}: no module {module}",
            where=f"searched {searched} and what is installed",
            hint=f"did you mean {meant}:{name}?" if (meant := _near_module(module, places)) else _ON_THE_PATH,
        )
    if file.suffix == ".py":
        _check_class(target, name, file)


def _refuse_shadowed(target: str, top: str, folders: list[Path]) -> None:
    """A job finds Python's modules and installed ones before those of `workload.path`."""
    if (shadowed := shadowing_file(top, folders, ImportSearch(last=folders))) is not None:
        own, first = shadowed
        raise ConfigError(
            f"workload.target={target}: a job would import {first} as {top}, which comes before {own}",
            where="workload.path",
            hint=f"rename it, for example to my_{own.parent.name if own.stem == '__init__' else own.name}, "
            "and its imports and workload.target with it",
        )


def shadowed_helpers(config: RunConfig, beside: Path | None = None) -> list[str]:
    """Return warnings about imported modules of `workload.path` that a job would find elsewhere."""
    folders = [Path(folder).expanduser() for folder in config.workload.path]
    if config.command or config.trains_built_in_workload or not folders:
        return []
    own = config.workload.target.partition(":")[0].partition(".")[0]
    names, search = named_tops(config, beside or Path.cwd()) - {own}, ImportSearch(last=folders)
    found = [(name, shadowing_file(name, folders, search)) for name in sorted(names)]
    return [f"the job imports {where[1]} as {name}, not {where[0]}" for name, where in found if where is not None]


_ON_THE_PATH = "workload.path=[/folder/that/holds/it] puts a folder on the import path"


def _near_module(module: str, places: list[Path]) -> str:
    """The module that is meant: without the end of its file's name, or the one that is spelled nearly so."""
    if module.endswith(".py") and _file_of(module.removesuffix(".py"), places):
        return module.removesuffix(".py")
    top, _, name = module.rpartition(".")
    folders = [place / Path(*top.split(".")) for place in places] if top else places
    near = [near_module(folder, name) for folder in folders]
    return ".".join(filter(None, (top, next(filter(None, near), "")))) if any(near) else ""


def _file_of(module: str, places: list[Path]) -> Path | None:
    below = Path(*module.split("."))
    for place in places:
        for file in (place / below.with_suffix(".py"), place / below / "__init__.py"):
            if file.is_file():
                return file
    return None


def _installed(module: str) -> Path | None:
    """The file of an installed module, found without importing anything of it."""
    top, _, rest = module.partition(".")
    spec = PathFinder.find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    return _file_of(rest, [Path(place) for place in spec.submodule_search_locations or ()])


def _check_class(target: str, name: str, file: Path) -> None:
    """The class must be named at the top level of its file; a syntax error is told here and not on 512 nodes."""
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        place = f"{file}:{line}" if line else str(file)
        raise ConfigError(f"{file} is no Python that runs here: {why}", where=place, hint="mend it") from error
    _check_base(target, name, file, tree)
    names = {name for node in tree.body for name in _names_of(node)}
    # A star import or a module's __getattr__ may bring any name: then only the job can tell.
    if name in names or names & {"*", "__getattr__"}:
        return
    near = nearest(name, names)
    hint = did_you_mean(near and f"{target.partition(':')[0]}:{near}", "workload.target=module:Class")
    raise ConfigError(f"workload.target={target}: no {name} in {file}", where="workload.target", hint=hint)


_SIGNATURES = {"build_model": "build_model(self)", "loss": "loss(self, model, batch)"}


def _check_base(target: str, name: str, file: Path, tree: ast.Module) -> None:
    """Refuse a plain class that lacks what every workload has, where nothing could give it that."""
    binds = [node for node in tree.body if name in _names_of(node)]
    if len(binds) != 1 or not isinstance(kind := binds[0], ast.ClassDef):
        return
    if (lacks := missing_method(kind, tree)) is not None:
        need, typed = lacks
        raise ConfigError(
            f"workload.target={target}: {name} has no {need}(), which every workload needs",
            where=f"{file}:{kind.lineno}",
            hint=f"did you mean {need} where you wrote {typed}?" if typed else f"def {_SIGNATURES[need]}: ...",
        )
    inherits = any(not (isinstance(base, ast.Name) and base.id == "object") for base in kind.bases)
    if inherits or kind.keywords or kind.decorator_list:
        return
    own = {each for node in kind.body for each in _names_of(node)}
    if not own & {"__init__", "__new__"} or not own & {"build_model", "__getattr__"}:
        raise ConfigError(
            f"workload.target={target}: {name} is no BaseWorkload",
            where=f"{file}:{kind.lineno}",
            hint=f"import orch;  class {name}(orch.BaseWorkload): ...",
        )


def _names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {
        child.id
        for child in ast.walk(node)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
    } | {
        child.name for child in ast.walk(node) if isinstance(child, (ast.ClassDef, ast.FunctionDef))
    }  # fmt: skip
