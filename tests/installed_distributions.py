"""Distributions in a folder, as an installer leaves them."""

import shutil
from pathlib import Path


def install(folder: Path, name: str, version: str, top: str = "") -> None:
    """Install a distribution in place of another version of it. `top`: the module that it provides."""
    for old in folder.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text(f"{top or name}/__init__.py,,\n{info.name}/RECORD,,\n../../bin/{name},,\n")
