"""What a file's mode keeps from its owner: root sees no difference."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def folder_of_an_ordinary_user() -> Iterator[Path]:
    """An empty folder of the user that this process is inside; where it is root, that is nobody."""
    root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="orch-test-"))  # pytest's own folders let nobody else in
    try:
        if root:
            os.chown(folder, _NOBODY, -1)
            os.seteuid(_NOBODY)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o700)
        shutil.rmtree(folder)
