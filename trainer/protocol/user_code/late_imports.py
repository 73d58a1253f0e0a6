"""The user's modules that ranks import after their code was recorded, without an `import` statement.

Imports by `pydoc.locate`, by a library that creates objects from names, by a registry or by a pickle are not visible
in the source, so a rank's modules are inspected after its first step.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from trainer.protocol.config import ProgramConfig
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord
from trainer.protocol.user_code.installed_packages import imported_names, third_party
from trainer.protocol.user_code.record_code import record_imported

_COVERS = "; the modules that rank 0 had imported by its first step"


def carry_late(now: CodeRecord, before: CodeRecord | None) -> CodeRecord:
    """Add the late files of an earlier record in their present state: ranks are about to import them again.

    A missing file is left out, because importing it fails anyway.
    """
    if before is None:
        return now
    names = [name for name in before.late if name in before.files and name not in now.files]
    paths = {name: Path(before.files[name].path) for name in names}
    return _with_late(now, {name: CodeFile.read(path) for name, path in paths.items() if path.is_file()})


def add_late(record: CodeRecord, modules: Mapping[str, Any], config: ProgramConfig) -> CodeRecord:
    """Replace the record's late files by the user's files among these modules, imported by a rank since it started.

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
    covers = record.covers.removesuffix(_COVERS) + (_COVERS if late else "")
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
