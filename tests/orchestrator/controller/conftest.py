"""A registry whose controller ends with the test."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.controller import service
from orchestrator.registry.lease import host_name
from orchestrator.registry.store import Store


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    registry = tmp_path / "registry.db"
    Store.open(registry).close()
    yield registry
    found = service.status(registry)
    if found.alive and found.pid not in (None, os.getpid()) and found.host == host_name():
        process = psutil.Process(found.pid)
        if process.cmdline()[0].startswith("orch-controller"):  # some tests let this process's parent hold a lease
            process.kill()
