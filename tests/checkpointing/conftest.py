"""A folder on a disk, for tests that need what memory lacks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpointing.proofs.mounts import folder_on_disk


@pytest.fixture
def disk() -> Iterator[Path]:
    with folder_on_disk() as folder:
        yield folder
