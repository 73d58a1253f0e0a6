"""The lab for tests marked `slurm`: one for the whole session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import LabError, SlurmLab, install


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A running Slurm of four nodes; skipped with the reason where it cannot be had, except under CI=true."""
    try:
        install()
        slurm = SlurmLab(_private(tmp_path_factory)).start()
    except LabError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield slurm
    slurm.stop()


def _private(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("slurm-lab")
