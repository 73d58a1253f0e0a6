"""Checkpoint folders that real frameworks wrote, recorded as names, sizes and small texts."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "recorded"

WriteFolder = Callable[[str], Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> WriteFolder:
    """Return a function that writes the folder recorded under this name. Files without a text have only their size."""

    def write(name: str) -> Path:
        folder = tmp_path / name
        for relative, content in json.loads((RECORDED / f"{name}.json").read_text()).items():
            path = folder / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.write_text(content)
            elif isinstance(content, int):
                with path.open("wb") as stream:
                    stream.truncate(content)
            else:
                path.write_bytes(base64.b64decode(content["base64"]))
        return folder

    return write
