"""Which files beside a workload belong to it: what it imports, and no script that happens to lie there."""

from pathlib import Path

import pytest

from orchestrator.submission.code_changes import code_changes
from orchestrator.submission.imported_files import imported_names, is_imported

FILES = {
    "mine.py": "import orch\nimport helpers\nfrom pack.deep import thing\n",
    "helpers.py": "import math\n",
    "pack/__init__.py": "from . import side\n",
    "pack/side.py": "",
    "pack/deep.py": "from .side import x\nfrom .. import above\n",
    "pack/unused.py": "",
    "scratch.py": "import mine\n",
}


def made(folder: Path, **more: str) -> Path:
    for name, text in {**FILES, **more}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def relevant(folder: Path) -> set[str] | None:
    names = imported_names([folder], "mine")
    return None if names is None else {str(name) for name in FILES if is_imported(str(name), names)}


def test_what_a_workload_imports_is_its_code(tmp_path: Path) -> None:
    assert relevant(made(tmp_path)) == {"mine.py", "helpers.py", "pack/__init__.py", "pack/side.py", "pack/deep.py"}


def test_a_file_that_would_be_imported_in_the_place_of_a_library_counts(tmp_path: Path) -> None:
    names = imported_names([made(tmp_path)], "mine")
    assert names is not None
    assert is_imported("math.py", names)
    assert is_imported("orch/__init__.py", names)
    assert is_imported("data.json", names), "nobody knows who reads it"
    assert not is_imported("math2.py", names)


@pytest.mark.parametrize(
    "text",
    ["import importlib\nimportlib.import_module(name)\n", "__import__(name)\n", "exec(text)\n", "def broken(:\n",
     "import sys\nsys.path.insert(0, 'sub')\n", "from importlib import import_module\n"],
)  # fmt: skip
def test_where_nobody_can_say_every_file_counts(tmp_path: Path, text: str) -> None:
    assert relevant(made(tmp_path, **{"helpers.py": text})) is None


def test_a_model_that_is_evaluated_imports_nothing_by_it(tmp_path: Path) -> None:
    assert relevant(made(tmp_path, **{"helpers.py": "model.eval()\n"})) is not None


def test_several_folders_are_one_import_path(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, name, text in ((first, "mine.py", "import other\n"), (second, "other.py", "import third\n")):
        folder.mkdir()
        (folder / name).write_text(text)
    assert imported_names([first, second], "mine") == ["mine", "other", "third"]


def test_scripts_that_come_change_and_go_beside_a_workload_are_no_other_code() -> None:
    old = {"sha256": "1", "files": {"mine.py": "a", "notes.py": "b", "old.py": "c"}}
    new = {"sha256": "2", "files": {"mine.py": "a", "notes.py": "B", "new.py": "d"}, "imported": ["mine"]}
    assert code_changes([old], [new]) == []
    assert code_changes([old], [{**new, "imported": ["mine", "new", "old"]}]) == ["old.py is gone", "new.py is new"]
    unknown = {key: value for key, value in new.items() if key != "imported"}
    assert code_changes([old], [unknown]) == ["notes.py changed", "old.py is gone", "new.py is new"]
