"""Search for the files that imports load, and recognition of the user's own files."""

import importlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from trainer.protocol.user_code.installed_packages import read_text

_ORCH = Path(__file__).resolve().parents[3]
_OWN_PACKAGES = tuple(_ORCH / name for name in ("orch", "orchestrator", "trainer", "checkpointing"))
_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})
_STANDARD = tuple({Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")})


class ImportSearch:
    """Module search as in a job: in `first`, then in this interpreter's own path, then in `last`."""

    def __init__(self, last: Iterable[Path] = (), first: Iterable[Path] = ()) -> None:
        self._first, self._last = [str(place) for place in first], [str(place) for place in last]
        importlib.invalidate_caches()  # the finders cache folders, and a file may be newer
        self._found: dict[str, ModuleSpec | None] = {}

    def find_file(self, name: str) -> Path | None:
        """Return the file that `import name` would load, or None for a namespace, a built-in or a missing module."""
        spec = self._spec(name)
        origin = spec.origin if spec is not None and spec.has_location else None
        return find_containing_file(origin) if origin is not None else None

    def is_package(self, name: str) -> bool:
        """Return whether the name belongs to a regular package, to which files can add modules."""
        spec = self._spec(name)
        return spec is not None and spec.has_location and spec.submodule_search_locations is not None

    def is_there(self, name: str) -> bool:
        return self._spec(name) is not None

    def is_namespace(self, name: str) -> bool:
        """Return whether the name is a namespace package, a folder without `__init__.py`."""
        spec = self._spec(name)
        return spec is not None and spec.origin is None and spec.loader is None

    def _spec(self, name: str) -> ModuleSpec | None:
        if name not in self._found:
            above, _, _ = name.rpartition(".")
            self._found[name] = self._below(name, above) if above else self._top(name)
        return self._found[name]

    def _below(self, name: str, above: str) -> ModuleSpec | None:
        package = self._spec(above)
        if package is None or package.submodule_search_locations is None:
            return None
        places = list(package.submodule_search_locations)
        try:
            return PathFinder.find_spec(name, places)
        except KeyError:  # a folder without an `__init__.py`: its finder looks up the parent package in `sys.modules`
            found = ModuleSpec(name, None, is_package=True)
            inner = (os.path.join(place, name.rpartition(".")[2]) for place in places)
            found.submodule_search_locations = [place for place in inner if os.path.isdir(place)]
            return found

    def _top(self, name: str) -> ModuleSpec | None:
        namespace = None
        for spec in self._tops(name):
            if spec.origin is not None or spec.loader is not None:
                return spec
            namespace = namespace or spec  # a folder without `__init__.py`: any module with that name takes precedence
        return namespace

    def _tops(self, name: str) -> Iterator[ModuleSpec]:
        if (first := PathFinder.find_spec(name, self._first)) is not None:
            yield first
        for finder in sys.meta_path:
            # Third-party finders may fail. The import itself then fails too, and its error names the finder.
            with suppress(ImportError, AttributeError, TypeError, ValueError, LookupError, OSError):
                if (found := finder.find_spec(name, None)) is not None:
                    yield found
        if (last := PathFinder.find_spec(name, self._last)) is not None:
            yield last


def find_containing_file(path: str) -> Path | None:
    """Return this file or the archive that contains it (as in `libs.zip/module.py`), or None if neither exists."""
    if os.path.isfile(path):
        return Path(path)
    return next((above for above in Path(path).parents if above.is_file()), None)


class UserFiles:
    """Recognition of the user's own files, as opposed to files of Python, orch and installed distributions.

    A distribution that was installed from a user's folder, archive or repository (`direct_url.json`) is also the
    user's code, because its version does not change with its content.
    """

    def __init__(self) -> None:
        self._records: dict[Path, _Installed] = {}
        self._are_libraries: dict[Path, bool] = {}

    def has(self, path: Path) -> bool:
        """Return whether this file is the user's own code."""
        real = path.resolve()
        if any(real.is_relative_to(own) for own in _OWN_PACKAGES):
            return False
        place = next((above for above in path.parents if self._is_library(above)), None)
        if place is not None:
            installed = self._records.setdefault(place, _Installed(place))
            return not installed.has(path.relative_to(place).as_posix())
        return not any(real.is_relative_to(place) for place in _STANDARD)

    def _is_library(self, folder: Path) -> bool:
        """Return whether distributions are installed in this folder. `pip install --target` allows any name."""
        if folder not in self._are_libraries:
            self._are_libraries[folder] = folder.name in _LIBRARY_FOLDERS or any(folder.glob("*.dist-info"))
        return self._are_libraries[folder]


class _Installed:
    """Installer records of one `site-packages` folder."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def has(self, relative: str) -> bool:
        """Return whether the file belongs to a distribution that is identified by its version."""
        top = relative.partition("/")[0].removesuffix(".py")
        return self._is_debians or f"\n{relative}," in self._files or top in self._eggs

    @cached_property
    def _is_debians(self) -> bool:
        """Return whether Debian's packages fill this folder, to which pip installs nothing. Some have no list."""
        return any(read_text(info / "INSTALLER").strip() == "debian" for info in self._place.glob("*.dist-info"))

    @cached_property
    def _files(self) -> str:
        """Return all lines of the RECORD files, except those of the user's own distributions."""
        infos = [info for info in self._place.glob("*.dist-info") if not (info / "direct_url.json").is_file()]
        return "\n" + "\n".join(read_text(info / "RECORD") for info in infos)

    @cached_property
    def _eggs(self) -> frozenset[str]:
        """Return the top-level names of distributions without a RECORD, as installed by Debian."""
        infos = list(self._place.glob("*.egg-info"))
        infos += [info for info in self._place.glob("*.dist-info") if not (info / "RECORD").is_file()]
        return frozenset(word for info in infos for word in read_text(info / "top_level.txt").split())


def shadowing_file(name: str, folders: Sequence[Path], search: ImportSearch) -> tuple[Path, str] | None:
    """Return a module in the folders that another module shadows in the job, and where the other module comes from."""
    standard = name in sys.stdlib_module_names
    for folder in folders:
        for own in (folder / name / "__init__.py", folder / f"{name}.py"):
            if not own.is_file():
                continue
            found = search.find_file(name)
            if found is not None and found.exists() and found.samefile(own):
                return None
            if found is not None or standard:
                return own, str(found) if found is not None else "part of Python itself"
    return None
