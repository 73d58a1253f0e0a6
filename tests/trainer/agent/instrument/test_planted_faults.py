"""The start-up module fails safe: with each planted fault, a program runs as without it.

Each program runs twice, with and without the module, and both runs must end alike. `steps` is what the agent reads.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.trainer.agent.instrument.instrumented import ONE_RANK, STARTUP, STEP, ForkServer, Instrumented, instrumented

PRIVATE_MOUNTS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.unshare(0x20000), ctypes.get_errno()
assert not libc.mount(b"none", b"/", None, 0x44000, None), ctypes.get_errno()
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault in a program with torch."""

    code: str
    """Program, after the definition of `step`."""
    before: str = ""
    """Code that runs before the start-up module."""
    steps: int | None = None
    """Step in the cell at the end. None: the program is not instrumented."""
    error: str = ""
    """Start of the error in the program record."""
    complaint: str = ""
    """Text on stderr, if the cell cannot be reached."""
    root: bool = False
    """Whether the fault needs root."""


FAULTS = {
    "no /dev/shm": Fault(
        before=PRIVATE_MOUNTS + "assert not libc.mount(b'none', b'/dev/shm', b'tmpfs', 1, b'size=4k')",
        code="step()\nimport os\nprint(os.access('/dev/shm', os.W_OK))", steps=1, root=True,
    ),
    "read-only /proc": Fault(
        before=PRIVATE_MOUNTS + "assert not libc.mount(b'none', b'/proc', None, 0x1021, None), ctypes.get_errno()",
        code="step()", steps=1, root=True,
    ),
    "no /proc": Fault(
        before=PRIVATE_MOUNTS + "assert not libc.umount2(b'/proc', 2), ctypes.get_errno()",
        code="step()\nimport os\nprint(os.listdir('/proc'))", complaint="FileNotFoundError", root=True,
    ),
    "cell gone": Fault(
        before="import os\nos.environ.update(ORCH_CELLS='/proc/self/fd/900', ORCH_STACKS='/proc/self/fd/900')",
        code="step()\nstep()", complaint="this program is not instrumented: FileNotFoundError",
    ),
    "cell too small": Fault(
        before="import os\nos.environ['ORCH_CELLS'] = f'/proc/self/fd/{os.memfd_create(chr(65))}'", code="step()",
        complaint="this program is not instrumented: ValueError",
    ),
    "no stacks": Fault(before="import os\nos.environ['ORCH_STACKS'] = '/nowhere'", code="step()", steps=1),
    "closed descriptors": Fault(
        code="""
import os, tempfile
step()
os.closerange(3, 10_000)
files = [tempfile.TemporaryFile() for _ in range(40)]
step()
if hasattr(__import__("signal"), "SIGRTMIN") and "orch_program_rank" in __import__("sys").modules:
    os.kill(os.getpid(), __import__("signal").SIGRTMIN + 6)
print({os.fstat(file.fileno()).st_size for file in files})
""",
        steps=2,
    ),
    "few descriptors": Fault(
        before="import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))", code="step()", steps=1
    ),
    "fork after torch": Fault(
        code="""
import os
step()
if not os.fork():
    step(), step()
    os._exit(0)
print(os.wait()[1])
""",
        steps=1,
    ),
    "fork that trains": Fault(
        code="""
import os
if not os.fork():
    step(), step()
    os._exit(0)
print(os.wait()[1])
""",
        steps=2,
    ),
    "threads": Fault(
        code="""
import threading
kept = []
def train():
    own = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    kept.append(own)
    for _ in range(300):
        own.step()
threads = [threading.Thread(target=train) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
""",
        steps=300,
    ),
    "memory error in the hook": Fault(
        code="""
import sys
step()
if "orch_program_rank" in sys.modules:
    def fail(*words):
        raise MemoryError("planted")
    sys.modules["orch_program_rank"].current()._cell.enter = fail
step(), step()
""",
        steps=1, error="MemoryError: planted",
    ),
    "deep recursion": Fault(
        code="""
step()
def recurse(depth):
    try:
        recurse(depth + 1)
    except RecursionError:
        pass
    try:
        step()
    except RecursionError:
        pass
import sys
sys.setrecursionlimit(150)
recurse(0)
sys.setrecursionlimit(1000)
print(step())
""",
    ),
    "error of a signal handler in the hook": Fault(
        code="""
import signal, sys
def interrupt(*words):
    raise TimeoutError("the program's own")
signal.signal(signal.SIGUSR1, interrupt)
step()
if "orch_program_rank" in sys.modules:
    rank = sys.modules["orch_program_rank"].current()
    enter = rank._cell.enter
    rank._cell.enter = lambda *words: (signal.raise_signal(signal.SIGUSR1), enter(*words))
else:
    step = lambda: signal.raise_signal(signal.SIGUSR1)
try:
    step()
except TimeoutError as error:
    print(error)
""",
        steps=1,
    ),
    "chroot and chdir": Fault(
        code="import os\nstep()\nos.chdir('/usr')\nos.chroot('.')\nos.chdir('/')\nstep()", steps=2, root=True
    ),
    "another user": Fault(code="import os\nstep()\nos.setgid(65534)\nos.setuid(65534)\nstep()", steps=2, root=True),
    "another user from the start": Fault(
        before="import os\nos.setgid(65534)\nos.setuid(65534)", code="step()",
        complaint="is not instrumented", root=True,
    ),
    "no stderr": Fault(
        before="import os, sys\nos.environ['ORCH_CELLS'] = '/nowhere'\nsys.stderr = None", code="step()"
    ),
    "workers that are forked": Fault(
        code="""
data = torch.utils.data.TensorDataset(torch.arange(8))
for batch in torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork"):
    step()
""",
        steps=8,
    ),
    "workers that are spawned": Fault(
        code="""
data = torch.utils.data.TensorDataset(torch.arange(4))
for batch in torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="spawn"):
    step()
""",
        steps=4,
    ),
    "another interpreter that trains": Fault(
        code=f"""
import subprocess, sys
step()
print(subprocess.run([sys.executable, "-W", "ignore", "-c", {STEP + "step(), step()"!r}]).returncode)
""",
        steps=1,
    ),
    "environment cleared": Fault(
        code="import os\nstep()\nos.environ.clear()\nstep()\nimport torch.distributed.checkpoint", steps=2
    ),
    "hooks without a rank": Fault(
        before="import os\nos.environ['ORCH_CELLS'] = ','\nos.environ['LOCAL_RANK'] = '7'", code="step()"
    ),
}  # fmt: skip


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Instrumented]:
    with instrumented(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


SLOW = ("workers that are spawned", "another interpreter that trains")
"""Faults for which another interpreter imports torch."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] if name in SLOW else []) for name in FAULTS]
)
def test_a_program_with_a_fault_runs_as_without_orch(name: str, program: Instrumented, server: ForkServer) -> None:
    fault = FAULTS[name]
    if fault.root and os.getuid():
        pytest.skip("needs root")
    environ = {**program.environment, **ONE_RANK}
    bare, done = (
        server.run(STEP + fault.code, {**environ, "ORCH_INSTRUMENT": mode}, program.folder, fault.before)
        for mode in ("off", "auto")
    )
    assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout), done.stderr
    assert done.returncode == 0, done.stderr
    found = program.cells[0].program()
    new_lines = [line for line in done.stderr.splitlines() if line not in bare.stderr.splitlines()]
    assert [fault.complaint in line for line in new_lines] == [True] * bool(fault.complaint), done.stderr
    if fault.steps is None:
        assert found is None or name == "deep recursion"
    else:
        assert found is not None
        assert found.error.startswith(fault.error)
        assert bool(found.error) == bool(fault.error), found.error
        assert program.reading().step == fault.steps


TORCHLESS = {
    "no site": ["-S"],
    "isolated": ["-I"],
    "no environment": ["-E"],
    "safe path": ["-P"],
    "optimised": ["-OO"],
    "warnings are errors": ["-W", "error"],
}


@pytest.mark.parametrize("name", TORCHLESS)
def test_an_interpreter_with_options_runs_as_without_orch(name: str, program: Instrumented) -> None:
    text = (
        "import sys\ntry:\n    import torch_that_is_missing\nexcept ImportError as error:\n    print(error)\n"
        "print([module for module in sys.modules if module.startswith('torch')])"
    )
    done = _run_both(program, [*TORCHLESS[name], "-c", text])
    assert (done[0].returncode, done[0].stdout, done[0].stderr) == (0, done[1].stdout, "")
    assert program.cells[0].program() is None


def test_the_programs_own_start_up_module_runs_and_its_errors_are_as_without_orch(
    program: Instrumented, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.STARTED = __file__\n1 / 0\n")
    done = _run_both(program, ["-c", "import sys\nprint(STARTED, 'sitecustomize' in sys.modules)"], str(tmp_path))
    assert done[0].stdout == done[1].stdout == f"{tmp_path}/sitecustomize.py False\n"
    assert done[0].stderr.splitlines()[-2:] == done[1].stderr.splitlines()[-2:]


def test_a_torch_that_fails_to_import_fails_as_without_orch(program: Instrumented, tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nif os.path.exists(__file__ + '.ok'):\n    import ctypes.missing\n")
    text = (
        "import torch, sys\nprint(torch, torch.__spec__, torch.__loader__)\nopen(torch.__file__ + '.ok', 'w').close()\n"
        "del sys.modules['torch']\ntry:\n    import torch\nexcept ImportError as error:\n    print(error)\n"
    )
    done = []
    for pythonpath in (os.pathsep.join([str(STARTUP), str(tmp_path)]), str(tmp_path)):
        (package / "__init__.py.ok").unlink(missing_ok=True)
        done += program.run("-c", text, ranks=1, PYTHONPATH=pythonpath)
    addresses = [[word for word in one.stdout.split() if not word.startswith("0x")] for one in done]
    assert addresses[0] == addresses[1]
    assert len(addresses[0]) > 10
    assert [one.returncode for one in done] == [0, 0]
    complaints = [line for line in done[0].stderr.splitlines() if line not in done[1].stderr.splitlines()]
    assert program.cells[0].program() is not None or all(line.startswith("orch: ") for line in complaints)


def test_a_program_that_replaces_its_import_path_starts_children_without_orch(program: Instrumented) -> None:
    text = (
        "import os, subprocess, sys\nos.environ['PYTHONPATH'] = '/nowhere'\n"
        "subprocess.run([sys.executable, '-c', 'import sys; print(\"orch_import_hook\" in sys.modules)'], check=True)\n"
    )
    (done,) = program.run("-c", text, ranks=1)
    assert (done.returncode, done.stdout) == (0, "False\n")


def _run_both(
    program: Instrumented, words: list[str], path: str = ""
) -> list["subprocess.CompletedProcess[str]"]:  # fmt: skip
    """Return the program's runs with and without orch."""
    found = []
    for startup in (str(STARTUP), ""):
        environ = {**program.environment, **ONE_RANK, "PYTHONPATH": os.pathsep.join(filter(None, [startup, path]))}
        if not startup:
            environ = {name: value for name, value in environ.items() if not name.startswith("ORCH_")}
        found.append(subprocess.run([sys.executable, *words], env=environ, text=True, capture_output=True, check=False))
    return found
