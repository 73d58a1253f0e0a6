"""A local user, whose leftovers are ended with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.user import User


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    """A user of the embedded default: simulated nodes on this machine."""
    someone = User(tmp_path, "local")
    yield someone
    someone.leave()
