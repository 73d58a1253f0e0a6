"""Order of tests among workers, and shared fixtures: an S3 server and a process that forks ranks."""

import asyncio
import gc
import inspect
import logging
import os
import tempfile
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.checkpointing.proofs.mounts import hide_mounts
from tests.forked_workers import fork_workers
from tests.forked_writers import fork_writers
from tests.open_databases import watch
from tests.slurm.suites import SUITES
from tests.trainer.agent.warm_agents import WarmAgents, warm_agents
from tests.warm_programs import WarmPrograms, warm_programs
from tests.warm_root import share_root

BUCKET = "checkpoints"
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}

# The proof that no step was trained twice, in every run of the tests.
os.environ["ORCH_WORK_LOG"] = "1"
# By default an example that takes longer than 200 ms fails: on a busy machine any may.
hypothesis.settings.register_profile("orch", deadline=None)
hypothesis.settings.load_profile("orch")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


fork_writers()
watch()  # a connection to SQLite that is left open fails its test

# Imported objects stay, and collecting garbage among a million objects takes longer than most tests.
gc.disable()


MEMORY = "/dev/shm"
ROOM = 8 << 30
"""Free memory in bytes that the files of tests need; all tests together write half of that."""


def pytest_configure(config: pytest.Config) -> None:
    """Start shared processes, and put files into memory if there is room, because disks are slow."""
    if os.path.isdir(MEMORY) and psutil.virtual_memory().available > ROOM:
        free = os.statvfs(MEMORY)
        if free.f_bavail * free.f_frsize > ROOM and not free.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    if config.option.collectonly:
        return
    if not hasattr(config, "workerinput"):  # before anything is started: killed tests must leave nothing mounted
        hide_mounts()
    if config.getoption("numprocesses", None):  # in the process that starts the workers
        folder = tempfile.TemporaryDirectory(prefix="orch-tests-")
        config.add_cleanup(folder.cleanup)
        share_root(Path(folder.name), imports_now=not config.option.file_or_dir)
        fork_workers(config, Path(folder.name))


def pytest_collection_finish() -> None:
    """Freeze imported objects, and collect only the garbage of tests, rarely."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort long tests first, beginning with the Slurm lab, so that short ones fill the end.

    Files of long tests are shuffled, so that computing and waiting tests share the cores.
    """

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        path = item.nodeid.partition("::")[0]
        is_long = item.get_closest_marker("multi") is not None or path.startswith("tests/trainer/agent/")
        return item.get_closest_marker("slurm") is None, not is_long, zlib.crc32(path.encode()) if is_long else 0

    items.sort(key=place)


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Create no cases of deselected proofs: each worker would create thousands and run none."""
    if collector.config.option.markexpr != "not proof":
        return None
    own = any(mark.name == "proof" for mark in getattr(obj, "pytestmark", ()))
    return [] if own or collector.get_closest_marker("proof") else None


OWN_LAB = ("test_expedited_requeue.py", "test_outages.py", "test_slurm_versions.py")
"""Files of Slurm tests that do not use the lab of all others."""


class TestsByFile(LoadScopeScheduling):
    """Scheduler that gives a worker one file at a time; files that share a lab or a run count as one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.startswith("tests/scenarios/"):  # few files of very many tests, which share nothing
            return nodeid
        if path.endswith(
            tuple(f"end_to_end/test_{name}.py" for name in ("local", "restore_tests", "stopped_processes"))
        ):
            return "the run that was not disturbed"
        if not path.startswith("tests/slurm/"):
            return path
        suite = next((name for name in SUITES if f"[{name}" in nodeid), "")
        return f"{path if path.endswith(OWN_LAB) else 'slurm'} {suite}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # it would put the files with most tests first
    return TestsByFile(config, log)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # half a second, for those who ask

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    patch = pytest.MonkeyPatch()
    for key, value in {**_CREDENTIALS, "AWS_ENDPOINT_URL": address}.items():
        patch.setenv(key, value)
    for key in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "http_proxy"):
        patch.delenv(key, raising=False)
    patch.setenv("NO_PROXY", ",".join(filter(None, [os.environ.get("NO_PROXY"), host])))
    with urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT"), timeout=10):
        pass
    try:
        yield address
    finally:
        patch.undo()
        server.stop()


@pytest.fixture
def s3_url(s3_server: str, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{abs(hash(request.node.nodeid)):x}"


@pytest.fixture(scope="session")
def programs() -> Iterator[WarmPrograms]:
    with warm_programs() as made:
        yield made


@pytest.fixture(scope="session")
def agents() -> Iterator[WarmAgents]:
    with warm_agents() as made:
        yield made
