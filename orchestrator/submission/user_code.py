"""Checks of the user's code before a run exists, in a child process with a time limit."""

import ast
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orchestrator.config.run_config import RunConfig
from orchestrator.config.yaml_text import near_file
from orchestrator.errors import ConfigError
from orchestrator.near_words import did_you_mean, nearest
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.submission.command_script import check_command
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.failures.rank_end import exit_words
from trainer.protocol.secrets import run_secrets
from trainer.protocol.secrets.secret_redaction import in_use
from trainer.protocol.user_code.code_record import CodeRecord
from trainer.protocol.user_code.import_search import ImportSearch, shadowing_file
from trainer.protocol.user_code.record_code import named_tops

NOTED_AFTER = 2.0
"""Seconds to wait before the user is informed of the check."""
_LAST_WORDS = 4096


@dataclass(frozen=True, kw_only=True)
class ChildAnswer:
    """Findings of a child process. `ended` is true if it finished in time; `died` describes its crash, if any."""

    found: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    died: str = ""


class BoundedChild:
    """A child process `python -P -m MODULE DESCRIPTOR`, killed with its own children at the end of the block.

    It reads JSON from stdin and writes JSON objects, one per line, to DESCRIPTOR.
    """

    def __init__(self, module: str, order: Mapping[str, Any], environ: Mapping[str, str], what: str) -> None:
        """`what` describes the check to a user who waits for it."""
        self._redactor = in_use(environ)
        self._what, self._printed = what, tempfile.TemporaryFile()  # noqa: SIM115  # closed when the block is left
        self._answers, theirs = os.pipe()
        self._started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs)], env=dict(environ), pass_fds=[theirs],
                stdin=subprocess.PIPE, stdout=self._printed, stderr=self._printed, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has already died; `answer` reports its last output
            self._process.stdin.write(json.dumps(order).encode())
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answers)
        self._printed.close()

    def answer(self, seconds: float, note: Callable[[str], None]) -> ChildAnswer:
        """Wait until the child ends, at most `seconds` after its start. During a long wait, call `note`."""
        text, noted, ended = b"", False, False
        while not ended and (left := self._started + seconds - time.monotonic()) > 0:
            if not noted and time.monotonic() - self._started >= NOTED_AFTER:
                noted = True
                note(f"{self._what} (at most {seconds:.0f} s)")
            ready, _, _ = select.select([self._answers], [], [], min(left, 0.2))
            if ready:
                part = os.read(self._answers, 1 << 16)
                text, ended = text + part, not part
        lines = [json.loads(line) for line in text.splitlines() if line.endswith(b"}")]
        found = {key: value for line in lines for key, value in line.items()}
        died = "" if found.pop("done", False) or not ended else self._last_words()
        return ChildAnswer(found=found, ended=ended and not died, died=died)

    def _last_words(self) -> str:
        status = self._process.wait()
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - _LAST_WORDS))
        lines = [line.strip() for line in self._printed.read().decode(errors="replace").splitlines() if line.strip()]
        how = exit_words(status, -status if status < 0 else None)
        return self._redactor.text(f"{how}: {lines[-1]}" if lines else how)


IMPORT_WITHIN = 60.0
"""Time limit in seconds for an import, including torch. A slower import is left to the job."""
_MODULE = "trainer.worker.startup.inspect_workload"
_SAME_ENVIRONMENT = frozenset({"default", "nccl"})
"""Templates that do not change the job's import path."""

Note = Callable[[str], None]
Finish = Callable[[Note, Note], CodeRecord | None]


@contextmanager
def inspecting(config: RunConfig, kind: str, environ: Mapping[str, str]) -> Iterator[Finish]:
    """Import the workload in a child process, which ends with this block.

    The yielded function waits for the import. It takes callbacks for a long wait and for warnings, and returns the
    imported code, or None if unknown. It raises ConfigError for a setting that would make the job fail. Nothing is
    imported if jobs use another interpreter. The built-in model is imported only if the configuration names its
    classes.
    """
    wrap = config.parallel.fsdp.wrap
    plain = config.trains_built_in_workload and (wrap == "auto" or wrap.isdecimal())
    if config.command or config.cluster.python or plain:
        yield lambda note, warn: None
        return
    what = f"waiting for the import of {config.workload.target}, to see what it needs"
    with BoundedChild(_MODULE, asdict(config), job_environment(config, environ), what) as child:
        yield lambda note, warn: _judge(child.answer(IMPORT_WITHIN, note), config, kind, warn)


def job_environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return those environment variables of the job's processes that are known here."""
    submitter = Submitter.from_environ(environ)
    path = {"PYTHONPATH": submitter.package_root} if submitter.package_root else {}
    made = {**submitter.environ(environ), **path, "OMP_NUM_THREADS": "1", **config.env}
    given = {name: environ[name] for name in config.env_from if name in environ}
    if config.secrets_file:
        with suppress(run_secrets.SecretsRefused, OSError):  # the submission itself reports these errors
            given |= run_secrets.read_list(Path(config.secrets_file))
    run_secrets.enter(given, made)
    return made


def _judge(answer: ChildAnswer, config: RunConfig, kind: str, warn: Note) -> CodeRecord | None:
    target = config.workload.target
    if refused := answer.found.get("refused"):
        what, hint = refused
        raise ConfigError(what, where=f"workload.target={target}", hint=hint)
    if failed := answer.found.get("failed"):
        # Other machines may have other devices and files, but their modules are the same.
        if traits(kind).simulated_nodes or (
            answer.found["is_import"] and set(config.cluster.templates) <= _SAME_ENVIRONMENT
        ):
            raise ConfigError(failed, where="imported with the variables that a job has", hint=_HINT)
        warn(f"{failed}; the job imports it again, and fails if the error occurs there too")
    elif answer.died:
        warn(f"importing {target} ended the process: {answer.died}; the job imports it again")
    elif not answer.ended:
        warn(f"importing {target} takes longer than {IMPORT_WITHIN:.0f} s here, so submit did not wait for it")
    return CodeRecord.from_json(answer.found.get("code"))


_HINT = "install what is missing for this interpreter, or fix the code; a job does not see this shell's PYTHONPATH"


REQUIRED = ("build_model", "loss")
OPTIONAL = (
    "build_data", "build_optimizer", "build_scheduler", "load_state_dict", "metrics", "parallelize", "state_dict",
    "validate",
)  # fmt: skip
_NEAR = 0.82
_OURS = ("orch", "trainer.worker.workload")


def near_methods(config: RunConfig) -> list[str]:
    """Return warnings about misspelled workload methods, found without importing the class."""
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
    """Return a required method that the class lacks, with any misspelling of it, or None if the class may work.

    Only a class that derives from BaseWorkload alone is checked.
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
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias)
    named = _used_names(tree) | {node.name for node in ast.walk(tree) if isinstance(node, defined)}
    if {"setattr", "__getattr__", "__getattribute__", "__dict__", "globals"} & named:
        return None
    typed = {meant: typed for typed, meant, _ in _slips(kind, tree)}
    return next(((need, typed.get(need, "")) for need in REQUIRED if need not in named), None)


def _slips(kind: ast.ClassDef, tree: ast.Module) -> list[tuple[str, str, int]]:
    """Return unused methods with a name close to a workload method: name, intended name, line."""
    own = {node.name: node.lineno for node in kind.body if isinstance(node, ast.FunctionDef)}
    used = _used_names(tree)
    found = []
    for typed, line in own.items():
        near = nearest(typed, [*REQUIRED, *OPTIONAL], _NEAR)
        if near and typed not in used and near not in own and not typed.startswith("_"):
            found.append((typed, near, line))
    return found


def _used_names(tree: ast.Module) -> set[str]:
    """Return every attribute, name and string in a file; code may call a method by any of them."""
    fields: dict[type[ast.AST], str] = {ast.Attribute: "attr", ast.Name: "id", ast.Constant: "value"}
    return {str(getattr(node, fields[type(node)])) for node in ast.walk(tree) if type(node) in fields}


OURS = ("orch", "orchestrator", "trainer", "checkpointing")
"""Top-level names that always mean orch's own packages inside a job."""
_IMPORT_PATH = "PYTHONPATH"
_ROOT = Path(__file__).resolve().parents[2]


def check(config: RunConfig, cwd: Path | None = None) -> None:
    """Raise ConfigError for code that a job cannot import or start, or that another module would shadow.

    `cwd` is the folder from which the run was submitted, by default this process's.
    """
    folders = [Path(folder).expanduser() for folder in config.workload.path]
    for folder in folders:
        _check_folder(folder)
    _check_import_path(config)
    if config.command:
        check_command(config, cwd or Path.cwd())
    else:
        _check_target(config.workload.target, folders)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"workload.path: no folder {folder}", where="workload.path", hint="give an existing folder")
    if (taken := _find_name_clash(folder)) is not None:
        raise ConfigError(
            f"{taken} has the name of one of orch's own packages, so a job could never import it",
            where="workload.path",
            hint=f"rename it, for example to my_{taken.name}, and its imports and workload.target with it",
        )


def _find_name_clash(folder: Path) -> Path | None:
    """Return the file or folder in this folder that Python would import instead of an orch package."""
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
    """Refuse a PYTHONPATH that would let other packages shadow orch's own in the job."""
    key = "env" if _IMPORT_PATH in config.env else "env_from"
    value = config.env.get(_IMPORT_PATH, os.environ.get(_IMPORT_PATH, "") if _IMPORT_PATH in config.env_from else "")
    for folder in filter(None, value.split(os.pathsep)):
        if (taken := _find_name_clash(Path(folder))) is not None:
            raise ConfigError(
                f"{taken} has the name of one of orch's own packages, and the job's PYTHONPATH puts it first",
                where=f"{key}.{_IMPORT_PATH}" if key == "env" else f"{key}: {_IMPORT_PATH}",
                hint=f"rename it, or remove {folder} from PYTHONPATH; workload.path=[FOLDER] comes after orch's own",
            )


def _check_target(target: str, folders: list[Path]) -> None:
    module, _, name = target.partition(":")
    top = module.partition(".")[0]
    places = [_ROOT] if top in OURS else folders
    if top not in OURS:
        _refuse_shadowed(target, top, folders)
    file = _find_file(module, [str(place) for place in places]) or (None if top in OURS else _find_file(module, None))
    if file is None:
        searched = ", ".join(str(place) for place in places) or "no folder (workload.path is empty)"
        raise ConfigError(
            f"workload.target={target}: no module {module}",
            where=f"searched {searched} and installed packages",
            hint=f"did you mean {meant}:{name}?" if (meant := _near_module(module, places)) else _ON_THE_PATH,
        )
    if file.suffix == ".py":
        _check_class(target, name, file)


def _refuse_shadowed(target: str, top: str, folders: list[Path]) -> None:
    """Refuse a module shadowed by a standard-library or installed one, since jobs search `workload.path` last."""
    if (shadowed := shadowing_file(top, folders, ImportSearch(last=folders))) is not None:
        own, first = shadowed
        raise ConfigError(
            f"workload.target={target}: a job would import {first} as {top}, which comes before {own}",
            where="workload.path",
            hint=f"rename it, for example to my_{own.parent.name if own.stem == '__init__' else own.name}, "
            "and its imports and workload.target with it",
        )


def shadowed_helpers(config: RunConfig, cwd: Path | None = None) -> list[str]:
    """Return warnings about modules in `workload.path` that a job would import from elsewhere."""
    folders = [Path(folder).expanduser() for folder in config.workload.path]
    if config.command or config.trains_built_in_workload or not folders:
        return []
    own = config.workload.target.partition(":")[0].partition(".")[0]
    names, search = named_tops(config, cwd or Path.cwd()) - {own}, ImportSearch(last=folders)
    found = [(name, shadowing_file(name, folders, search)) for name in sorted(names)]
    return [f"the job imports {where[1]} as {name}, not {where[0]}" for name, where in found if where is not None]


_ON_THE_PATH = "workload.path=[/folder/that/holds/it] puts a folder on the import path"


def _near_module(module: str, places: list[Path]) -> str:
    """Return the module with the nearest spelling, without a file suffix, or "" if none is close."""
    below = Path(*module.removesuffix(".py").split("."))
    file = next(filter(None, (near_file(place / below, (".py",)) for place in places)), "")
    return ".".join([*below.parent.parts, file.removesuffix(".py")]) if file else ""


def _find_file(module: str, places: list[str] | None) -> Path | None:
    """Return a module's file without importing it, searching these folders or, by default, Python's own."""
    invalidate_caches()
    spec: ModuleSpec | None = None
    for name in module.split("."):
        if (spec := PathFinder.find_spec(name, places)) is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin else None


def _check_class(target: str, name: str, file: Path) -> None:
    """Check the syntax, and that the top level defines the class, so that the job does not fail on 512 nodes."""
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        place = f"{file}:{line}" if line else str(file)
        raise ConfigError(f"{file} is not valid Python here: {why}", where=place, hint="fix it") from error
    _check_base(target, name, file, tree)
    names = {name for node in tree.body for name in _bound_names(node)}
    # A star import or a module's __getattr__ may define any name, so only the job can check.
    if name in names or names & {"*", "__getattr__"}:
        return
    near = nearest(name, {node.name for node in tree.body if isinstance(node, ast.ClassDef)})
    hint = did_you_mean(near and f"{target.partition(':')[0]}:{near}", "workload.target=module:Class")
    raise ConfigError(f"workload.target={target}: no {name} in {file}", where="workload.target", hint=hint)


_SIGNATURES = {"build_model": "build_model(self)", "loss": "loss(self, model, batch)"}


def _check_base(target: str, name: str, file: Path, tree: ast.Module) -> None:
    """Refuse a plain class that lacks the required methods and cannot inherit them."""
    binds = [node for node in tree.body if name in _bound_names(node)]
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
    own = {each for node in kind.body for each in _bound_names(node)}
    if not own & {"__init__", "__new__"} or not own & {"build_model", "__getattr__"}:
        raise ConfigError(
            f"workload.target={target}: {name} is not a BaseWorkload",
            where=f"{file}:{kind.lineno}",
            hint=f"import orch;  class {name}(orch.BaseWorkload): ...",
        )


def _bound_names(node: ast.stmt) -> set[str]:
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
