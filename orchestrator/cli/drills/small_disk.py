"""Faults that need no process of the job: a damaged checkpoint and a full disk."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

import psutil

from checkpointing.tiers.catalog import Catalog, Entry
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import Precondition
from orchestrator.home import make_state_home
from trainer.protocol.run_dir import RunDir

_WRITER = "orch-writer"
_DAMAGE = 64
"""Bytes inverted in the middle of the largest file."""


def expendable(folder: RunDir) -> Entry:
    """Return the newest committed checkpoint. Raises Precondition without an older one to restore instead."""
    found = Catalog(folder.checkpoints).committed_entries() if folder.checkpoints.is_dir() else []
    if len(found) < 2:
        raise Precondition(
            f"{folder.name} has {len(found)} committed checkpoints in its own folder: without the newest one it could "
            "not go on", where=str(folder.checkpoints), hint=f"orch save {folder.name}   orch ckpt ls {folder.name}",
        )  # fmt: skip
    return found[0]


def damage_newest(folder: RunDir) -> tuple[int, Path]:
    """Invert bytes of the newest committed checkpoint; return its step and the file. Raises Precondition."""
    newest = expendable(folder)
    files = [path for path in (folder.checkpoints / newest.name).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    middle = largest.stat().st_size // 2
    if largest.stat().st_nlink > 1:  # hard-linked to another run's checkpoint, which must stay intact
        own = largest.with_name(f"{largest.name}.own")
        shutil.copyfile(largest, own)
        os.replace(own, largest)
    descriptor = os.open(largest, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(descriptor, _DAMAGE, middle)
        os.pwrite(descriptor, bytes(255 - byte for byte in before), middle)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return newest.step, largest


def fill_disk(job_id: str) -> int:
    """Stop all checkpoint writers of a job on this machine from writing to files; return their number.

    A file size limit simulates the full disk; really filling a disk would affect its other users.
    """
    job = psutil.Process(int(job_id.partition("-")[0]))
    writers = [process for process in job.children(recursive=True) if _title(process).startswith(_WRITER)]
    for writer in writers:
        _, hard = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (0, hard))
    return len(writers)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return ""


SIZE_MIB = 32
"""Size with room for a few checkpoints of the demo."""
_BLOCKS = (1 << 20, 1 << 12, 1)


class SmallDisk:
    """A mounted tmpfs; `fill` uses up its space, `make_room` frees it again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Use up the free space; call again after space was freed."""
        with self._filler.open("ab", buffering=0) as stream:
            for block in _BLOCKS:
                with suppress(OSError):
                    while stream.write(bytes(block)):
                        pass

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)

    @property
    def is_filled(self) -> bool:
        return self._filler.exists()

    def keep(self, run_dir: Path) -> None:
        """Unmount the disk, keeping the ended run on it under the same path. Raises OSError."""
        draft = self.path.with_name(f".{run_dir.name}.{token_hex(4)}.tmp")
        shutil.copytree(run_dir, draft, symlinks=True)
        _mount("umount", "--lazy", str(self.path))
        shutil.rmtree(run_dir, ignore_errors=True)
        os.rename(draft, run_dir)


@contextmanager
def small_disk(screen: Screen, path: Path) -> Iterator[SmallDisk | None]:
    """Mount a tmpfs at `path` until `SmallDisk.keep`; yields None, with a note, if it cannot be mounted."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.path.ismount(path):  # left over by an earlier drill whose run continued
        _mount("umount", "--lazy", str(path))
    mounted = _mount("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=700", "orch-drill", str(path))
    if not mounted:
        screen.note(
            "drill: no small file system can be mounted here (that needs root, or `unshare -rm`); a limit on the size "
            "of files stands for the full disk"
        )
        yield None
        return
    disk = SmallDisk(path)
    screen.note(f"drill: a file system of {SIZE_MIB} MiB is mounted at {path}, and will be filled")
    yield disk
    if os.path.ismount(path):
        screen.warn("mounted", f"the run goes on, and its disk stays mounted:  umount {path}")


def run_in_namespace(screen: Screen) -> int | None:
    """Rerun this command in a new mount namespace; return its exit code, or None if impossible or unnecessary.

    It uses a separate ORCH_HOME, because a controller outside does not see the mounts inside.
    """
    unshare = shutil.which("unshare")
    if os.geteuid() == 0 or unshare is None:
        return None
    demos = make_state_home() / "demo-runs"
    demos.mkdir(mode=0o700, parents=True, exist_ok=True)
    inside = [unshare, "--map-root-user", "--mount"]
    with tempfile.TemporaryDirectory(dir=demos) as probe:
        if not _mount(*inside, "mount", "-t", "tmpfs", "orch-drill", probe):
            return None
    home = Path(tempfile.mkdtemp(prefix="full-disk-home-", dir=demos))
    environ = {name: value for name, value in os.environ.items() if name != "ORCH_REGISTRY"}
    screen.note(f"drill: in a mount namespace of its own; look at its run with  ORCH_HOME={home} orch show @last")
    done = subprocess.run([*inside, sys.executable, *sys.argv], env={**environ, "ORCH_HOME": str(home)}, check=False)
    return done.returncode


def _mount(*command: str) -> bool:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
