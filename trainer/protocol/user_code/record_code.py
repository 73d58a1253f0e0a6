"""Creation of code records from imported modules, the imports in files, and modules that a rank imports later."""

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from trainer.protocol.config import ProgramConfig
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord
from trainer.protocol.user_code.import_search import ImportSearch, UserFiles, find_containing_file
from trainer.protocol.user_code.installed_packages import find_site_folders, imported_names, read_versions, third_party

_DYNAMIC = frozenset(
    {
        "import_module", "run_path", "run_module", "spec_from_file_location", "__import__",
        "locate", "resolve_name", "instantiate", "hub",  # from pydoc, pkgutil, hydra, torch
    }
)  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_BUILTINS = frozenset({"exec", "eval"})
"""Names with which code imports modules without an `import` statement. `model.eval()` does not count."""
_WORDS = "|".join(sorted(_DYNAMIC | _BUILTINS | {r"sys\s*\.\s*path"})).encode()
_LATE = re.compile(rb"^[ \t]+(?:from|import)\s|[:;]\s*(?:from|import)\s|\b(?:%b)\b" % _WORDS, re.MULTILINE)


_PLAIN = re.compile(rb"^(?:from|import)[ \t]+(\w[^#\n]*)", re.MULTILINE)


def plain_imports(text: bytes) -> set[str]:
    """Return top-level names in `import` statements outside functions. Faster than `named_imports`."""
    parts = [part.split() for line in _PLAIN.findall(text) for part in line.partition(b" import")[0].split(b",")]
    return {part[0].partition(b".")[0].decode(errors="replace") for part in parts if part}


def has_late_imports(text: bytes) -> bool:
    """Return whether a function may contain an import, which does not run when the module is imported."""
    return _LATE.search(text) is not None


def named_imports(text: bytes, package: Sequence[str], *, imported: bool = False) -> tuple[set[str], bool]:
    """Return the dotted names that a module of this package imports, and whether it may import other modules.

    A name may be a module or a member of a module. `imported` means that the code outside functions has already run.
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
    if isinstance(node, ast.Attribute):  # a changed `sys.path` adds folders
        in_sys = isinstance(node.value, ast.Name) and node.value.id == "sys"
        return node.attr in _DYNAMIC or (in_sys and node.attr == "path")
    return False


MOST = 2000
"""Maximum number of files in a record."""
_SCRIPTS = (".py", ".sh")
_SETTINGS = (".yaml", ".yml", ".toml")
"""Suffixes of settings files that a command may name."""
_NAMED_SCRIPT = re.compile(rb"[\w./-]+\.(?:py|sh)\b")
_NAMED_MODULE = re.compile(rb"\bpython[\d.]*(?:[ \t]+-(?:[WX][ \t]+\S+|[^\s-]\S*))*?[ \t]+-m[ \t]*([\w.]+)")
_COMMENT = re.compile(rb"(?:^|[ \t])#.*$", re.MULTILINE)
_FOLDER_CHANGE = re.compile(rb"(?:^|[\s;&|({])(?:cd|pushd)[ \t]+(?:--[ \t]+)?([^;&|\n]+)", re.MULTILINE)
_EXPORTED_PATH = re.compile(rb"\bPYTHONPATH=([^\s;&|]+)")
_VARIABLE = re.compile(rb"\$\([^)]*\)|\$\{[^}]*\}|\$\w+")
"""Prefix of a folder's name in a shell script, as in `$(dirname "$0")/src`."""
_SHELL, _PYTHON_LINE = re.compile(rb"#![^\n]*sh\b"), re.compile(rb"#![^\n]*python")
"""First lines of programs whose names have no suffix."""
_LEFT_OUT = {"__pycache__", ".git", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")


def record_imported(modules: Mapping[str, Any], skip: Collection[str], config: ProgramConfig) -> CodeRecord:
    """Record the user's modules imported in this process, except `skip`, and the imports in their functions."""
    folders = _folders(config, Path())
    found = _Collector(ImportSearch(last=folders))
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if name in skip or name == "__main__" or not isinstance(file, str):
            continue
        place = find_containing_file(file) if os.path.isabs(file) else None
        if place is not None:  # a module created at run time may have any name here
            found.add(name, place, imported=True)
    found.follow()
    # A dynamic import in a library does not concern the files next to the workload.
    whole = [folder for folder in folders if any(folder in file.parents for file in found.dynamic)]
    covers = f"the modules that importing {config.workload.target} loads, and the modules that these name"
    return _with_folders(found, whole, covers, [] if whole else [config.workload.target.partition(":")[0]])


def record_named(config: ProgramConfig, beside: Path) -> CodeRecord:
    """Record the user's code from the imports in its files. `beside` is a command's working folder."""
    return _record_command(config, beside) if config.command else _record_target(config, beside)


def named_tops(config: ProgramConfig, beside: Path) -> set[str]:
    """Return the top-level modules that a workload's code imports from elsewhere."""
    found = _Collector(ImportSearch(last=_folders(config, beside)))
    found.add_module(config.workload.target.partition(":")[0])
    found.follow()
    return found.foreign


def read_again(record: CodeRecord) -> CodeRecord:
    """Read the files and the packages of a record again. The packages are unknown if a folder is missing.

    A missing late file is omitted, because the code may write such modules itself. Otherwise, its import fails.
    """
    files = {name: CodeFile.read(Path(one.path)) for name, one in record.files.items()}
    there = {name: one for name, one in files.items() if os.path.exists(one.path)}
    gone = tuple(name for name in files if name not in there and name not in record.late)
    return replace(read_packages_again(record), files=there, absent=gone)


def read_packages_again(record: CodeRecord) -> CodeRecord:
    """Read the packages of a record again."""
    return replace(record, packages=None if record.packages is None else read_versions(record.site_folders))


def with_packages(record: CodeRecord, config: ProgramConfig, modules: Mapping[str, Any]) -> CodeRecord:
    """Add the packages that ranks use. `modules` are those that this process imported for the user's code.

    Packages stay unknown for a command whose interpreter keeps them in an unusual place.
    """
    path, first = sys.path, list[str]()
    if config.command:
        path = _path_of_command(config.command[0], config.env.get("PATH"))
        first = [place for place in config.env.get("PYTHONPATH", "").split(os.pathsep) if place]
    if not path:
        return record
    folders = find_site_folders([*first, *path])
    imported = third_party({*record.imported, *imported_names(modules, folders)})
    return replace(record, packages=read_versions(folders), imported=imported, site_folders=folders)


def _path_of_command(program: str, search: str | None) -> list[str]:
    """Return the import path of this process, or the folders of another interpreter's installed packages."""
    found = shutil.which(program, path=search) if _PYTHON.fullmatch(program) else None
    prefix = Path(found or sys.executable).parent.parent
    if prefix == Path(sys.executable).parent.parent:
        return sys.path
    return [str(place) for place in sorted(prefix.glob("lib*/python3*/*-packages"))]


def _record_target(config: ProgramConfig, beside: Path) -> CodeRecord:
    folders, module = _folders(config, beside), config.workload.target.partition(":")[0]
    found = _Collector(ImportSearch(last=folders))
    found.add_module(module)
    found.follow()
    covers = f"the modules that {config.workload.target} imports, directly or through others"
    return _with_folders(found, folders, covers)


def _record_command(config: ProgramConfig, beside: Path) -> CodeRecord:
    named = _named_code(config.command, beside)
    scripts = list(named.files.items())
    first = dict.fromkeys(place.parent for _, place in scripts if place.suffix == ".py")
    paths = config.env.get("PYTHONPATH", "").split(os.pathsep)
    first |= dict.fromkeys([beside, *(beside / path for path in paths if path), *named.folders])
    found = _Collector(ImportSearch(first=first, last=_folders(config, beside)))
    for name, place in scripts:
        found.add(name, place, package=[])
    run = [name for module in named.modules for name in (module, f"{module}.__main__")]
    for name in run:
        found.add_module(name)
    found.follow()
    if named.shells and (named.is_unclear or found.lacks(named.modules)):
        found.dynamic.append(named.shells[-1])
    places = dict.fromkeys(place.parent for _, place in scripts)
    places |= dict.fromkeys(folder for name in run for folder, package in found.find_top_package(name) if not package)
    covers = "the scripts that the command names, and the modules that they name"
    return _with_folders(found, list(places), covers, run)


def _with_folders(found: "_Collector", folders: Sequence[Path], covers: str, modules: Sequence[str] = ()) -> CodeRecord:
    """Add every Python file of the folders, and of the modules' packages, if a file imports dynamically."""
    packages = [
        (folder, package)
        for folder, package in dict.fromkeys(place for name in modules for place in found.find_top_package(name))
        if package and any(folder in file.parents for file in found.dynamic)
    ]
    if found.dynamic and (folders or packages):
        whole = [*((folder, "") for folder in folders), *packages]
        for folder, package in whole:
            found.add_folder(folder, package)
        found.folders = tuple(str(folder) for folder, _ in whole)
        covers += f"; {found.dynamic[0].name} imports by other means, so every Python file of its folder counts"
    return found.record(covers)


def _folders(config: ProgramConfig, beside: Path) -> list[Path]:
    return [beside / Path(place).expanduser() for place in config.workload.path]


@dataclass
class _NamedCode:
    """Scripts and settings that a command and its shell scripts name, and the modules that they run (`python -m`).

    `folders` are other folders that scripts change to or search for modules. `is_unclear` means that a named script is
    in none of them.
    """

    files: dict[str, Path] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    shells: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    is_unclear: bool = False


def _named_code(command: Sequence[str], beside: Path) -> _NamedCode:
    words = [part for word in command for part in (word, word.partition("=")[2]) if part]
    names = [word for word in words if word.endswith((*_SCRIPTS, *_SETTINGS))]
    names += [command[0]] if "/" in command[0] and not _PYTHON.fullmatch(command[0]) else []
    texts = [" ".join(command).encode(errors="surrogateescape")]
    names += _script_names(b"\n".join(word.encode(errors="surrogateescape") for word in words if " " in word))
    found = _NamedCode(folders=_shell_folders(texts[0], beside))
    seen = set[str]()
    while names:
        name = names.pop(0)
        if name in seen:
            continue
        seen.add(name)
        places = _find_scripts(name, [*found.folders, beside, *(shell.parent for shell in found.shells)])
        found.is_unclear |= bool(found.shells) and not places and name.endswith(".py")
        for place in places:
            found.files[str(place) if name in found.files else name] = place
            if place.suffix == ".sh" or (not place.suffix and _SHELL.match(_bytes(place))):
                texts.append(_COMMENT.sub(b"", _bytes(place).replace(b"\\\n", b" ")))
                found.shells.append(place)
                found.folders += _shell_folders(texts[-1], place.parent) + _shell_folders(texts[-1], beside)
                names += _script_names(texts[-1])
    found.modules = list(dict.fromkeys(os.fsdecode(name) for text in texts for name in _NAMED_MODULE.findall(text)))
    return found


def _find_scripts(name: str, folders: Iterable[Path]) -> list[Path]:
    """Return files with this name in the folders. If the name started with a variable, only the rest is used."""
    places = dict.fromkeys(folder / part for part in (name, name.lstrip("/")) for folder in folders)
    # `Path.is_file` raises an error for a word that is too long for a file name.
    return list({place.resolve(): place for place in places if os.path.isfile(place)}.values())


def _script_names(text: bytes) -> list[str]:
    return sorted({os.fsdecode(word) for word in _NAMED_SCRIPT.findall(_VARIABLE.sub(b"", text))})


def _shell_folders(text: bytes, place: Path) -> list[Path]:
    """Return the folders that a shell script started in `place` changes to or adds to PYTHONPATH."""
    words = [*_FOLDER_CHANGE.findall(text), *(p for word in _EXPORTED_PATH.findall(text) for p in word.split(b":"))]
    bare = [
        os.fsdecode(_VARIABLE.sub(b"", word).translate(None, b"\"'")).strip().lstrip("/" * (b"$" in word))
        for word in words
    ]
    return [folder for word in bare if word and os.path.isdir(folder := place / word)]


class _Collector:
    """Collector of the user's files that follows their imports."""

    def __init__(self, search: ImportSearch) -> None:
        self._search, self._users = search, UserFiles()
        self._files: dict[str, CodeFile] = {}
        self._absent: set[str] = set()
        self._waiting: list[tuple[Path, list[str], bool]] = []
        self._seen: set[str] = set()
        self.dynamic: list[Path] = []
        self.foreign: set[str] = set()
        self._named: set[str] = set()
        self.folders: tuple[str, ...] = ()

    def add(self, name: str, path: Path, package: list[str] | None = None, *, imported: bool = False) -> None:
        """Add a file if it is the user's own. `package` is its package, by default derived from its name.

        `imported` means that its module-level imports have already run.
        """
        if name in self._files or len(self._files) >= MOST or not self._users.has(path):
            return
        self._files[name] = CodeFile.read(path)
        if path.suffix == ".py" or (not path.suffix and _PYTHON_LINE.match(_bytes(path))):
            parts = name.split(".")
            above = parts if path.name == "__init__.py" else parts[:-1]
            self._waiting.append((path, above if package is None else package, imported))

    def add_module(self, name: str) -> None:
        """Add a module and its parent packages, if they are the user's files."""
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            part = ".".join(parts[:depth])
            if part in self.foreign:
                return
            if part in self._seen:
                continue
            self._seen.add(part)
            file = self._search.find_file(part)
            if file is not None:
                self.add(part, file)
            elif not self._search.is_there(part) and (
                depth == 1 or self._search.is_package(".".join(parts[: depth - 1]))
            ):
                self._absent.add(part)
            # A module in a library is not the user's code.
            if depth == 1 and part not in self._files and (file is not None or not self._search.is_namespace(part)):
                self.foreign.add(part)
                self._seen.add(name)
                return

    def lacks(self, names: Iterable[str]) -> bool:
        """Return whether any of these modules was not found."""
        return not self._absent.isdisjoint({name.partition(".")[0] for name in names})

    def find_top_package(self, name: str) -> list[tuple[Path, str]]:
        """Return folder and name of a module's top-level package, or the folder and an empty name for a lone module."""
        top = name.partition(".")[0]
        if name not in self._files:
            return []
        file = Path(self._files[name].path)
        where = file.parent if file.name == "__init__.py" else file
        folder = [where, *where.parents][name.count(".")]
        return [(folder, top)] if folder != file else [(file.parent, "")]

    def add_folder(self, folder: Path, package: str = "") -> None:
        for place, below, names in os.walk(folder):
            if len(self._files) >= MOST:
                return
            below[:] = sorted(name for name in below if name not in _LEFT_OUT)
            for file in (Path(place, name) for name in sorted(names) if name.endswith(".py")):
                parts = (*filter(None, [package]), *file.relative_to(folder).with_suffix("").parts)
                self.add(".".join(parts[:-1] if parts[-1] == "__init__" and parts[1:] else parts), file)

    def follow(self) -> None:
        while self._waiting:
            path, package, imported = self._waiting.pop()
            text = _bytes(path)
            if imported:
                self._named |= plain_imports(text)
                if not has_late_imports(text):
                    continue
            try:
                names, dynamic = named_imports(text, package, imported=imported)
            except (SyntaxError, ValueError, RecursionError):
                continue
            self.dynamic += [path] if dynamic else []
            self._add_all(names)

    def _add_all(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            self.add_module(name)

    def record(self, covers: str) -> CodeRecord:
        full = len(self._files) >= MOST
        more = f"; only the first {MOST} files" if full else ""
        absent_tops = {name for name in self._absent if "." not in name}
        return CodeRecord(
            files=dict(sorted(self._files.items())), absent=tuple(sorted(self._absent)), covers=covers + more,
            imported=third_party(self.foreign | absent_tops | self._named),
            folders=() if full else self.folders,
        )  # fmt: skip


# Imports by `pydoc.locate`, by a library that creates objects from names, by a registry or by a pickle are not visible
# in the source, so a rank's modules are inspected after its first step.

_COVERS_LATE = "; the modules that rank 0 had imported by its first step"


def carry_late(now: CodeRecord, before: CodeRecord | None) -> CodeRecord:
    """Add the late files of an earlier record in their current state, because ranks will import them again.

    A missing file is omitted, because importing it fails anyway.
    """
    if before is None:
        return now
    names = [name for name in before.late if name in before.files and name not in now.files]
    paths = {name: Path(before.files[name].path) for name in names}
    return _with_late(now, {name: CodeFile.read(path) for name, path in paths.items() if path.is_file()})


def add_late(record: CodeRecord, modules: Mapping[str, Any], config: ProgramConfig) -> CodeRecord:
    """Replace the record's late files with the user's files among `modules`, which a rank has imported since its start.

    Recorded files among them are read again, because the rank imported them after they were recorded.
    """
    first = {name: file for name, file in record.files.items() if name not in record.late}
    own = _UsersPlaces(replace(record, files=first), config)
    found = record_imported({name: module for name, module in modules.items() if own.has(name, module)}, (), config)
    first |= {name: found.files[name] for name in first.keys() & found.files.keys() & modules.keys()}
    late = {name: file for name, file in found.files.items() if name not in first}
    libraries = imported_names(modules, record.site_folders)
    imported = third_party({*record.imported, *found.imported, *libraries})
    return _with_late(replace(record, files=first, imported=imported), late)


def _with_late(record: CodeRecord, late: Mapping[str, CodeFile]) -> CodeRecord:
    files = dict(sorted({**record.files, **late}.items()))
    covers = record.covers.removesuffix(_COVERS_LATE) + (_COVERS_LATE if late else "")
    return replace(record, files=files, late=tuple(sorted(late)), covers=covers)


class _UsersPlaces:
    """Folders of the user's code. Compilers such as torch's keep generated modules in other folders."""

    def __init__(self, record: CodeRecord, config: ProgramConfig) -> None:
        self._packages = {name.partition(".")[0] for name in record.files}
        places = [Path(place).expanduser() for place in config.workload.path]
        places += [place for folder in record.site_folders for place in _projects(Path(folder))]
        self._places = [place for given in places for place in {given.absolute(), given.resolve()}]
        self._sites = [Path(folder) for folder in record.site_folders]

    def has(self, name: str, module: object) -> bool:
        """Return whether the module is a Python file in one of these folders, or in a package with recorded files."""
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            return False
        path, top = Path(file), name.partition(".")[0]
        return top in self._packages or any(path.is_relative_to(place) for place in (*self._places, *self._sites))


def _projects(site: Path) -> Iterator[Path]:
    """Yield the folders of distributions that were installed from a folder, such as editable ones."""
    for entry in site.glob("*.dist-info/direct_url.json"):
        try:
            url = urlparse(json.loads(entry.read_bytes())["url"])
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if url.scheme == "file" and os.path.isdir(place := unquote(url.path)):
            yield Path(place)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
