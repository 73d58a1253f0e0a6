"""The start-up module and the adapters run in the interpreters that programs use, from Python 3.9 on."""

import ast
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.agent.instrument.instrumented import ONE_RANK, STARTUP, instrumented

FOLDERS = (STARTUP, STARTUP.parent, STARTUP.parents[1] / "adapters")
FILES = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]
CODE = """
import sys
hook = sys.modules["orch_import_hook"]
registry = hook.load_file("orch_adapter_registry", sys.argv[1])
for name in registry.NAMES:
    registry.load(name)
for name in ("cell_writer", "process_groups", "stop_agreement", "torch_hooks"):
    hook.load(name)
hook.load("program_rank").current().step(number=7, loss=1.5)
print("%d.%d" % sys.version_info[:2])
"""


def interpreters() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Return the name, the words and the variables of each interpreter on this machine and in the Debian roots."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    path = os.pathsep.join(["/usr/bin", "/usr/local/bin", *map(str, sorted(versions.glob("3.*/bin")))])
    for minor in range(9, 16):
        if found := shutil.which(f"python3.{minor}", path=path):
            yield f"3.{minor}", [found], {}
    for root in sorted((Path.home() / ".cache" / "orch-tests").glob("python-*-*")):
        for found in sorted((root / "usr" / "bin").glob("python3.[0-9]*")):
            loader, version = root / "lib64" / "ld-linux-x86-64.so.2", found.name.removeprefix("python")
            if loader.exists() and version.count(".") == 1 and version[-1].isdigit():
                libraries = [str(root / "usr" / "lib" / name) for name in ("x86_64-linux-gnu", "")]
                words = [str(loader.resolve()), "--library-path", ":".join(libraries), str(found)]
                yield f"{version} of {root.name}", words, {"PYTHONHOME": str(root / "usr")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_have_the_syntax_of_python_3_9(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Match)]
    for node in ast.walk(tree):
        # Annotations such as `int | None` are text with this import, but are evaluated elsewhere.
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            assert not any(
                isinstance(side, ast.Constant) and side.value is None for side in (node.left, node.right)
            ) or ("from __future__ import annotations" in path.read_text())


@pytest.mark.parametrize(("words", "variables"), [
    pytest.param(words, variables, id=name) for name, words, variables in interpreters()
])  # fmt: skip
def test_an_interpreter_starts_the_module_and_loads_the_adapters(
    words: list[str], variables: dict[str, str], tmp_path: Path
) -> None:
    with instrumented(tmp_path) as program:
        environ = {**program.environment, **ONE_RANK, **variables}
        registry = str(FOLDERS[2] / "registry.py")
        done = subprocess.run(
            [*words, "-W", "error", "-c", CODE, registry], env=environ, text=True, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert (program.reading().step, program.reading().loss) == (7, 1.5)
        assert os.path.basename(words[-1]) in ("python" + done.stdout.strip(), "python3", "python")
