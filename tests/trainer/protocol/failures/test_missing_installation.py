"""Errors of an installation of which a part is away, from real packages in a folder of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.protocol.failures import missing_installation

PROGRAM = """
import sys
from trainer.protocol.failures.missing_installation import describe_missing
import torch, trainer.lazy, user
try:
    {call}
except Exception as error:
    sys.stdout.write(describe_missing(error))
"""
FILES = {
    "torch/__init__.py": (
        "def part(): import torch.gone\n"
        "def name(): from torch import gone\n"
        "def extra(): import tensorboard\n"
        "def data(): open(__file__ + '.json')\n"
    ),
    "trainer/lazy.py": "def part(): import trainer.gone\ndef other(): import gone\ndef data(): open('/no/such')\n",
    "user.py": "def part(): import torch.gone\ndef own(): import gone\ndef data(): open('/no/such')\n",
}


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small packages named torch and trainer, the second with the real file that is tested."""
    folder = tmp_path_factory.mktemp("installation")
    source = Path(missing_installation.__file__)
    target = folder / source.relative_to(source.parents[3])
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)
    for package in (target.parent, *target.parent.relative_to(folder).parents):
        (folder / package / "__init__.py").touch()
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("torch.part()", True),
        ("torch.name()", True),
        ("torch.data()", True),
        ("trainer.lazy.part()", True),
        ("trainer.lazy.other()", True),  # what orch itself depends on
        ("trainer.lazy.data()", False),  # a file of the run, of the data, ...
        ("torch.extra()", False),  # a package that the program asked torch to use
        ("user.part()", False),
        ("user.own()", False),
        ("user.data()", False),
    ],
)
def test_only_files_of_torch_and_of_orch_belong_to_the_installation(installation, call, missing):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=call)], cwd=installation, capture_output=True, text=True, timeout=60,
        check=True, env={"PYTHONPATH": str(installation), "PATH": ""},
    )  # fmt: skip
    assert bool(done.stdout) is missing, done.stdout
    assert not missing or str(installation) in done.stdout
