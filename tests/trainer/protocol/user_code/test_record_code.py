"""Which files are the user's code: what a program imports, wherever it lies, and nothing that only lies beside it."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.installed_distributions import install
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord, changed_files, changed_packages
from trainer.protocol.user_code.import_search import UserFiles
from trainer.protocol.user_code.installed_packages import find_site_folders, read_versions
from trainer.protocol.user_code.record_code import add_late, read_again, record_imported, record_named, with_packages

FILES = {
    "mine_in.py": "import orch\nimport helpers_in\nfrom pack_in.deep import thing\n",
    "helpers_in.py": "import math\n\ndef late():\n    from pack_in import late\n",
    "pack_in/__init__.py": "from . import side\n",
    "pack_in/side.py": "",
    "pack_in/late.py": "",
    "pack_in/deep.py": "from .side import x\nfrom .. import above\n",
    "pack_in/unused.py": "",
    "scratch.py": "import mine_in\n",
}
LATE = "class Mine:\n    def build_model(self):\n        return __import__(self.name)\n"
USED = {"mine_in", "helpers_in", "pack_in", "pack_in.side", "pack_in.late", "pack_in.deep"}


def made(folder: Path, **more: str) -> Path:
    for name, text in {**FILES, **more}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def workload(*folders: Path) -> JobConfig:
    return JobConfig(workload=WorkloadConfig(target="mine_in:Mine", path=tuple(map(str, folders))))


def named(*folders: Path) -> CodeRecord:
    return record_named(workload(*folders), Path("/"))


def command(folder: Path, *words: str, **env: str) -> CodeRecord:
    return record_named(JobConfig(command=words, env=env), folder)


def test_what_a_workload_imports_is_its_code(tmp_path: Path) -> None:
    assert set(named(made(tmp_path)).files) == USED


@pytest.mark.parametrize(
    "text",
    ["import importlib\nimportlib.import_module(name)\n", "__import__(name)\n", "exec(text)\n",
     "import sys\nsys.path.insert(0, 'sub')\n", "import pydoc\npydoc.locate(name)\n", "from torch import hub\n",
      "from importlib import import_module\n"],
)  # fmt: skip
def test_where_imports_go_by_other_means_every_file_counts(tmp_path: Path, text: str) -> None:
    record = named(made(tmp_path, **{"helpers_in.py": text}))
    assert set(record.files) == {*USED, "pack_in.unused", "scratch"}
    assert "helpers_in.py imports by other means" in record.covers


@pytest.mark.parametrize(
    ("module", "code"),
    [("pack_in.start", {"pack_in", "pack_in.start", "pack_in.side", "pack_in.late", "pack_in.deep", "pack_in.unused"}),
     ("space_in.below.start", {"space_in.below.start", "space_in.other.model"}),
     ("space_in", {"space_in.__main__", "space_in.other.model"}),
     ("start", {"start", *USED, "pack_in.unused", "scratch", "space_in.other.model"})],
)  # fmt: skip
def test_where_a_module_that_is_run_imports_by_other_means_its_package_counts(tmp_path, module, code):
    file = "space_in/__main__.py" if module == "space_in" else f"{module.replace('.', '/')}.py"
    folder = made(tmp_path, **{file: "__import__(name)\n", "space_in/other/model.py": ""})
    record = command(folder, "python", "-m", module)
    assert set(record.files) == code
    assert f"{Path(file).name} imports by other means" in record.covers


def test_where_an_installed_workload_imports_by_other_means_its_package_counts(tmp_path, monkeypatch):
    made(tmp_path, **{"chosen_in/__init__.py": "", "chosen_in/models/big.py": "", "chosen_in/work.py": LATE})
    monkeypatch.syspath_prepend(str(tmp_path))
    before = frozenset(sys.modules)
    __import__("chosen_in.work")
    config = JobConfig(workload=WorkloadConfig(target="chosen_in.work:Mine"))
    record = record_imported(sys.modules, before, config)
    for name in ("chosen_in", "chosen_in.work"):
        del sys.modules[name]
    assert set(record.files) == {"chosen_in", "chosen_in.work", "chosen_in.models.big"}


def test_a_model_that_is_evaluated_imports_nothing_by_it(tmp_path: Path) -> None:
    assert "scratch" not in named(made(tmp_path, **{"helpers_in.py": "model.eval()\n"})).files


def test_several_folders_are_one_import_path(tmp_path: Path) -> None:
    first, second = made(tmp_path / "first"), tmp_path / "second"
    second.mkdir()
    (second / "helpers_in.py").write_text("")
    (first / "helpers_in.py").rename(second / "helpers_in.py")
    assert set(named(first, second).files) == USED


def test_folders_without_an_init_file_are_packages_too(tmp_path: Path) -> None:
    deep = tmp_path / "space_in" / "below" / "deep"
    deep.mkdir(parents=True)
    (deep / "mine.py").write_text("from space_in.below import beside\nimport space_in.below.deep.other\n")
    (deep / "other.py").write_text("")
    (deep.parent / "beside.py").write_text("")
    config = JobConfig(workload=WorkloadConfig(target="space_in.below.deep.mine:Mine", path=(str(tmp_path),)))
    names = {"space_in.below.deep.mine", "space_in.below.deep.other", "space_in.below.beside"}
    assert set(record_named(config, tmp_path).files) == names


def test_notes_logs_and_databases_beside_the_code_are_no_code(tmp_path: Path) -> None:
    before = named(made(tmp_path))
    for name in ("README.md", "out.log", "runs.db", "scratch.py"):
        (tmp_path / name).write_text("new")
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    assert changed_files(before, named(tmp_path)) == []


@pytest.mark.parametrize("again", [read_again, lambda record: named(Path(record.files["mine_in"].path).parent)])
def test_hidden_files_behind_links_count_with_their_content(tmp_path: Path, again) -> None:
    folder, elsewhere = made(tmp_path / "code"), tmp_path / "elsewhere"
    (folder / ".gitignore").write_text("*")
    subprocess.run(["git", "-C", str(folder), "init", "-q"], check=True)
    (folder / "pack_in").rename(elsewhere)
    (folder / "pack_in").symlink_to(elsewhere)
    before = named(folder)
    (elsewhere / "side.py").write_text("x = 2\n")
    assert changed_files(before, again(before)) == ["pack_in.side changed"]
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", str(elsewhere), str(other)], check=True)
    (other / "late.py").write_text("y = 2\n")
    (folder / "pack_in").unlink()
    (folder / "pack_in").symlink_to(other)
    assert changed_files(before, again(before)) == ["pack_in.late changed", "pack_in.side changed"]


def test_a_module_that_comes_or_goes_is_named(tmp_path: Path) -> None:
    before = named(
        made(tmp_path, **{"mine_in.py": "try:\n import fancy_in\nexcept ImportError: pass\nimport helpers_in"})
    )
    (tmp_path / "fancy_in.py").write_text("")
    (tmp_path / "helpers_in.py").unlink()
    assert changed_files(before, named(tmp_path)) == ["helpers_in is gone", "fancy_in is new"]
    assert "helpers_in is gone" in changed_files(before, read_again(before))


OPTIONAL = """try:
    from {0} import _fast
except ImportError:
    _fast = None
"""


@pytest.mark.parametrize("package", [".", "pack_in"])
def test_a_module_that_appears_within_a_package_is_new(tmp_path: Path, package: str) -> None:
    made(tmp_path, **{"pack_in/side.py": OPTIONAL.format(package), "pack_in/__init__.py": "from .side import x\n"})
    before = named(tmp_path)
    assert "pack_in._fast" in before.absent
    assert not [name for name in before.imported if "." in name]
    (tmp_path / "pack_in/_fast.py").write_text("")
    assert changed_files(before, named(tmp_path)) == ["pack_in._fast is new"]
    assert changed_files(named(tmp_path), before) == ["pack_in._fast is gone"]


def test_an_optional_module_of_a_command_is_new(tmp_path: Path) -> None:
    made(tmp_path, **{"mine_in.py": OPTIONAL.format("pack_in")})
    before = command(tmp_path, "python", "mine_in.py")
    (tmp_path / "pack_in/_fast.py").write_text("")
    assert changed_files(before, command(tmp_path, "python", "mine_in.py")) == ["pack_in._fast is new"]


def test_a_plugin_beside_others_is_new_and_a_folder_of_output_is_not(tmp_path: Path) -> None:
    made(tmp_path, **{"pack_in/side.py": "import importlib\nimportlib.import_module(name)\n"})
    before = CodeRecord.from_json(json.loads(json.dumps(named(tmp_path).to_json())))
    assert before is not None
    (tmp_path / "outputs").mkdir()
    for name in ("pack_in/another.py", "outputs/mine_in.py", "pack_in/notes.txt"):
        (tmp_path / name).write_text("")
    assert changed_files(before, named(tmp_path)) == ["pack_in.another is new"]
    (tmp_path / "pack_in/unused.py").unlink()
    assert changed_files(before, read_again(before)) == ["pack_in.unused is gone"]


def test_code_in_an_archive_is_known_by_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def zipped(text: str) -> None:
        with zipfile.ZipFile(tmp_path / "libs.zip", "w") as archive:
            archive.writestr("zipped_in.py", text)

    zipped("SCALE = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "libs.zip")
    made(tmp_path, **{"mine_in.py": "import zipped_in\n"})
    before = named(tmp_path)
    module = SimpleNamespace(__file__=str(tmp_path / "libs.zip" / "zipped_in.py"))
    loaded = record_imported({"zipped_in": module}, (), workload(tmp_path))
    assert before.files["zipped_in"] == loaded.files["zipped_in"]
    zipped("SCALE = 4.0\n")
    assert changed_files(before, read_again(before)) == ["zipped_in changed"]


def installed(folder: Path, name: str, place: str = "site-packages", **about: str) -> Path:
    """A distribution as pip leaves it in a folder; `pip install --target` gives that folder any name."""
    site = folder / place
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text("width = 1\n")
    (info / "RECORD").write_text(f"{name}.py,sha256=abc,10\n{name}-1.0.dist-info/RECORD,,\n")
    for file, text in about.items():
        (info / file.replace("_json", ".json")).write_text(text)
    return site


@pytest.mark.parametrize("place", ["site-packages", "libraries"])
@pytest.mark.parametrize(("about", "counts"), [({}, False), ({"direct_url_json": '{"url": "file:///mine"}'}, True)])
def test_a_library_is_known_by_its_version_and_ones_own_package_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: dict[str, str], counts: bool, place: str
) -> None:
    site = installed(tmp_path, "wheel_in", place, **about)
    monkeypatch.syspath_prepend(str(site))
    (site / "by_hand_in.py").write_text("")
    folder = made(tmp_path / "code", **{"mine_in.py": "import wheel_in, by_hand_in\n"})
    assert set(named(folder).files) == {"mine_in", "by_hand_in", *(["wheel_in"] if counts else [])}


def test_an_editable_install_is_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(made(tmp_path / "src")))
    record = record_named(JobConfig(workload=WorkloadConfig(target="mine_in:Mine")), tmp_path)
    assert set(record.files) == USED


def test_what_was_imported_counts_wherever_it_came_from(tmp_path: Path) -> None:
    made(tmp_path / "code", **{"mine_in.py": "import sys\nsys.path.append('DEEP')\nimport deep_in\n"})
    program = f"""
import json, sys
from pathlib import Path
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.user_code.record_code import record_imported
skip = set(sys.modules)
sys.path += [{str(tmp_path / "code")!r}, {str(tmp_path / "deep")!r}]
import deep_in, helpers_in
for number, file in enumerate(["_ops.py", "/no/such/file.py", "a\\0b", None, 7]):
    sys.modules[f"made_{{number}}"] = type(sys)("made")
    sys.modules[f"made_{{number}}"].__file__ = file
config = JobConfig(workload=WorkloadConfig(target="mine_in:Mine", path=({str(tmp_path / "code")!r},)))
print(sorted(record_imported(sys.modules, skip, config).files))
"""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "deep_in.py").write_text("import email.charset\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    # `helpers_in` imports `pack_in.late` only when its function is called.
    assert done.stdout.strip() == "['deep_in', 'helpers_in', 'pack_in', 'pack_in.late', 'pack_in.side']"


def test_a_command_is_known_by_the_scripts_and_settings_that_it_names(tmp_path: Path) -> None:
    made(tmp_path, **{"run.sh": "#!/bin/sh\npython scratch.py\n", "big.yaml": "lr: 1\n", "out.log": ""})
    found = command(tmp_path, "python", "-u", "mine_in.py", "--config=big.yaml", "--log", "out.log")
    assert set(found.files) == {"mine_in.py", "big.yaml", *USED} - {"mine_in"}
    assert set(command(tmp_path, "bash", "run.sh").files) == {"run.sh", "scratch.py", *USED}
    assert set(command(tmp_path, "python", "-m", "pack_in.deep").files) == {"pack_in", "pack_in.deep", "pack_in.side"}
    assert command(tmp_path, "python", "-c", "print(1)").files == {}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("bash", "-c", "ulimit -c 0; exec python scratch.py --lr 1"), {"scratch.py", *USED}),
        (("bash", "-c", "python -u -m pack_in.deep"), {"pack_in", "pack_in.deep", "pack_in.side"}),
        (("env", "A=1", "python3", "-X", "dev", "-m", "pack_in.deep"), {"pack_in", "pack_in.deep", "pack_in.side"}),
        (("bash", "outer.sh"), {"outer.sh", "inner.sh", "pack_in", "pack_in.deep", "pack_in.side"}),
        (("bash", "-c", f"echo {'a' * 400} && python scratch.py"), {"scratch.py", *USED}),
        (("./start",), {"./start", "scratch.py", *USED}),
        (("./trains",), {"./trains", *USED}),
        (("python", "scratch.py", "-m", "helpers_in"), {"scratch.py", *USED}),
    ],
)
def test_what_a_shell_starts_is_the_code_of_a_command(tmp_path: Path, words: tuple[str, ...], wanted: set[str]) -> None:
    scripts = {
        "outer.sh": "bash inner.sh\n",
        "inner.sh": "python -u \\\n  -m pack_in.deep\n",
        "start": "#!/bin/bash\npython scratch.py\n",
        "trains": "#!/usr/bin/env python3\nimport mine_in\n",
    }
    record = command(made(tmp_path, **scripts), *words)
    assert set(record.files) == wanted
    assert "resnet50" not in command(tmp_path, "python", "scratch.py", "-m", "resnet50").absent


@pytest.mark.parametrize(
    "script",
    [
        "cd sub\npython train.py\n",
        'set -e\ncd "$(dirname "$0")/../sub"\nexec python train.py\n',
        'HERE=$(dirname "$0")\npython "$HERE/../sub/train.py"\n',
        "cd sub && python -m train\n",
        "export PYTHONPATH=$PWD/sub:$PYTHONPATH\npython -m train\n",
        "pushd sub; torchrun --nproc_per_node 2 train.py\n",
        "cd $PROJECT\npython train.py\n",  # anywhere: every Python file below the script counts
    ],
)
def test_a_shell_script_that_changes_folders_hides_no_code(tmp_path: Path, script: str) -> None:
    whole = "$PROJECT" in script
    bin_folder = tmp_path if whole else tmp_path / "bin"
    made(tmp_path, **{"sub/train.py": "import helper_sub\n", "sub/helper_sub.py": "", "train.py": ""})
    (tmp_path / "train.py").unlink()
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "run.sh").write_text(f"# like old.py\nsource ~/conda/etc/conda.sh\n{script}")
    record = command(tmp_path, "bash", str(bin_folder / "run.sh"))
    paths = {Path(one.path).resolve() for one in record.files.values()}
    assert {tmp_path / "sub" / "train.py", tmp_path / "sub" / "helper_sub.py", bin_folder / "run.sh"} <= paths
    assert (tmp_path / "scratch.py" in paths) == whole
    assert ("run.sh imports by other means" in record.covers) == whole


def test_a_command_finds_modules_beside_its_script_and_on_pythonpath(tmp_path: Path) -> None:
    made(tmp_path / "lib")
    (tmp_path / "train.py").write_text("import mine_in\n")
    assert set(command(tmp_path, "python", "train.py").files) == {"train.py"}
    assert set(command(tmp_path, "python", "train.py", PYTHONPATH="lib").files) == {"train.py", *USED}
    assert "helpers_in" in command(tmp_path, "python", str(tmp_path / "lib" / "scratch.py")).files


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.py")
    (tmp_path / name).write_text("a = 1\n")
    record = command(tmp_path, "python", name)
    record.write(tmp_path / "code.json")
    read = CodeRecord.read(tmp_path / "code.json")
    assert (read.digest, list(read.files)) == (read.digest, ["\ufffd.py"])
    assert CodeRecord.read(tmp_path / "absent.json") is None
    assert CodeRecord.from_json({"schema": "orch.code/9"}) is None
    assert CodeFile.read(tmp_path / "absent").sha256 == "unreadable: No such file or directory"


def test_versions_are_read_from_names_of_folders(tmp_path: Path) -> None:
    install(tmp_path / "first", "Pillow", "10.1", "PIL")
    install(tmp_path / "second", "pillow", "9.0", "PIL")
    install(tmp_path / "second", "torch", "2.13.0+cpu")
    (tmp_path / "second" / "old_style-1.5-py3.11.egg-info").write_text("")
    (tmp_path / "second" / "linked.egg-info").mkdir()
    (tmp_path / "second" / "linked.egg-info" / "PKG-INFO").write_text("Name: linked\nVersion: 0.3\n")
    (tmp_path / "empty").mkdir()
    folders = find_site_folders([str(tmp_path / name) for name in ("first", "empty", "second", "absent")])
    assert folders == (str(tmp_path / "first"), str(tmp_path / "second"))
    versions = {"linked": "0.3", "old-style": "1.5", "pillow": "10.1", "torch": "2.13.0+cpu"}
    assert read_versions(folders) == versions
    assert read_versions([*folders, str(tmp_path / "absent")]) is None, "unknown, and not empty"


def test_metadata_that_an_upgrade_has_left_behind_hides_no_new_version(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "timm", "1.0", "timm")
    before = CodeRecord(packages=read_versions([str(site)]), imported=("timm",), site_folders=(str(site),))
    install(tmp_path / "other", "timm", "2.0", "timm")
    (tmp_path / "other" / "timm-2.0.dist-info").rename(site / "timm-2.0.dist-info")
    assert changed_packages(before, read_again(before)) == {"timm": ("1.0", "1.0, 2.0")}


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (("timm", "2.0", "timm"), {"timm": ("1.0", "2.0")}),
        (("scikit_learn", "1.9", "sklearn"), {"scikit-learn": ("1.5", "1.9")}),
        (("black", "25", "black"), {}),
        (("nvidia_cublas", "13", "nvidia"), {"nvidia-cublas": ("12", "13")}),
        (("einops", "1.0", "einops"), {"einops": ("none", "1.0")}),
        (("orch", "9", "orch"), {}),
        (("mine_in", "2", "mine_in"), {}),
    ],
)
def test_packages_that_the_code_imports_are_compared(tmp_path, change, changed):
    site = tmp_path / "site"
    for name, version, top in (
        ("timm", "1.0", "timm"), ("scikit_learn", "1.5", "sklearn"), ("black", "24", "black"),
        ("nvidia_cublas", "12", "nvidia"), ("orch", "1", "orch"), ("mine_in", "1", "mine_in"),
    ):  # fmt: skip
        install(site, name, version, top)
    late = "import timm.layers\n\ndef late():\n    import einops, sklearn.svm\n"
    code = made(tmp_path / "code", **{"helpers_in.py": late})
    before = with_packages(named(code), JobConfig(command=("x",), env={"PYTHONPATH": str(site)}), {})
    assert {"timm", "einops", "sklearn"} <= set(before.imported)
    before = replace(before, imported=(*before.imported, "mine_in"))  # of the user's, compared by its files
    assert changed_packages(before, read_again(before)) == {}
    install(site, *change)
    assert changed_packages(before, read_again(before)) == changed
    assert changed_packages(CodeRecord(), read_again(before)) == {}, "packages of an older record are not known"


def test_a_package_that_is_gone_has_changed(tmp_path: Path) -> None:
    install(tmp_path, "other", "1.0")
    before = CodeRecord(
        packages={"timm": "1.0", "black": "1", "other": "1.0"}, imported=("timm",), site_folders=(str(tmp_path),)
    )
    assert changed_packages(before, read_again(before)) == {"timm": ("1.0", "none")}
    away = read_again(CodeRecord(packages={"timm": "1.0"}, imported=("timm",), site_folders=("/no/such/folder",)))
    assert away.packages is None


def test_imports_of_loaded_modules_are_known_without_parsing_them(tmp_path, monkeypatch):
    site = tmp_path / "site"
    install(site, "used_in", "1", "used_in")
    (site / "used_in.py").write_text("import below_in\n")
    install(site, "below_in", "1", "below_in")
    (site / "below_in.py").write_text("")
    (tmp_path / "loads_in.py").write_text("import used_in as one, math\nfrom typing_extensions import (\n  Self)\n")
    for folder in (site, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    before = frozenset(sys.modules)
    __import__("loads_in")
    config = JobConfig(workload=WorkloadConfig(target="loads_in:Mine", path=(str(tmp_path),)))
    loaded = {name: sys.modules[name] for name in sys.modules.keys() - before}
    record = with_packages(record_imported(sys.modules, before, config), config, loaded)
    for name in loaded:
        del sys.modules[name]
    assert set(record.imported) == {"used_in", "below_in", "typing_extensions"}
    assert record.site_folders[0] == str(site)


def test_a_command_with_an_interpreter_of_its_own_has_the_packages_of_that(tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    install(tmp_path / "env" / "lib" / "python3.11" / "site-packages", "timm", "1.0")
    assert with_packages(CodeRecord(), JobConfig(command=(str(python), "train.py")), {}).packages == {"timm": "1.0"}
    on_path = JobConfig(command=("python", "train.py"), env={"PATH": str(python.parent)})
    assert with_packages(CodeRecord(), on_path, {}).packages == {"timm": "1.0"}
    unusual = tmp_path / "unusual" / "bin" / "python"
    unusual.parent.mkdir(parents=True)
    unusual.symlink_to(sys.executable)
    assert with_packages(CodeRecord(), JobConfig(command=(str(unusual), "train.py")), {}).packages is None
    assert "torch" in (with_packages(CodeRecord(), JobConfig(command=(sys.executable, "train.py")), {}).packages or {})


def test_of_modules_that_a_rank_imports_late_only_those_of_the_users_places_count(tmp_path: Path) -> None:
    site, project, cache = tmp_path / "site", tmp_path / "project", tmp_path / "cache"
    code = made(tmp_path / "code")
    install(site, "linked", "1")
    install(site, "copied", "1")
    install(site, "library", "1")
    (site / "linked-1.dist-info" / "direct_url.json").write_text(json.dumps({"url": project.as_uri()}))
    (site / "copied-1.dist-info" / "direct_url.json").write_text("{}")
    files = {
        "pack_in.unused": code / "pack_in" / "unused.py", "linked": project / "linked.py",
        "copied": site / "copied" / "__init__.py", "library": site / "library" / "__init__.py",
        "torch._inductor.codecache.c1": cache / "c1.py", "built": code / "built.so",
    }  # fmt: skip
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    modules = {name: SimpleNamespace(__file__=str(file)) for name, file in files.items()}
    first = replace(named(code), site_folders=(str(site),))
    found = add_late(first, modules, workload(code))
    assert set(found.late) == {"pack_in.unused", "linked", "copied"}
    assert set(found.files) == {*first.files, *found.late}
    assert found.covers == f"{first.covers}; the modules that rank 0 had imported by its first step"
    assert add_late(found, modules, workload(code)) == found
    side = code / "pack_in" / "side.py"
    side.write_text("# edited after it was recorded, before a rank imported it\n")
    edited = add_late(found, {**modules, "pack_in.side": SimpleNamespace(__file__=str(side))}, workload(code))
    assert changed_files(found, edited) == changed_files(found, read_again(found)) != []
    assert add_late(found, modules, workload(code)) == found, "a module in memory is as it was recorded"
    assert add_late(found, {}, workload(code)) == replace(first, imported=found.imported)


def test_a_folder_of_debians_packages_is_not_the_users_code(tmp_path: Path) -> None:
    folder = tmp_path / "dist-packages"
    for name in ("listless", "listless_helpers", "listless-2.14.1.dist-info"):
        (folder / name).mkdir(parents=True)
    for name in ("listless", "listless_helpers"):
        (folder / name / "__init__.py").touch()
    assert UserFiles().has(folder / "listless_helpers" / "__init__.py")
    (folder / "listless-2.14.1.dist-info" / "INSTALLER").write_text("debian\n")
    assert not UserFiles().has(folder / "listless_helpers" / "__init__.py")
