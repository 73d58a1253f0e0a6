"""Unpacking of `cluster.stage.archive` to a node's own disk, once per node and digest.

The folder's name has the digest, so runs with different archives do not meet. A marker inside is written last: a folder
without it was left by an agent that died while unpacking, and is replaced.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from checkpointing.storage.durable import write_durably
from checkpointing.storage.storage_errors import error_words
from trainer.agent.nodes.node_disk import (
    DISK,
    FolderLock,
    NotPrepared,
    OnWait,
    delete_tree,
    delete_unused,
    explain_folder_error,
    ignore_wait,
    make_own_folder,
)
from trainer.protocol.config_sections.node_setup_config import StageConfig

MARKER = ".orch-staged"
_KEY = "cluster.stage.to"
_BLOCK = 4 << 20
_FULL = ("No space left on device", "Disk quota exceeded", "Wrote only ")  # the last one is of the file that fills it
_REMARK = "Removing leading "  # from names such as `/env/bin` and `../env`, which is no error
_TAR_OPTIONS = {".tar": "", ".tar.gz": "--gzip", ".tgz": "--gzip", ".tar.zst": "--zstd"}
_PROGRAMS = {"--gzip": "gzip", "--zstd": "zstd"}
_UNPACK_CONDA = "bin/conda-unpack"


@dataclass(frozen=True, kw_only=True)
class StagedArchive:
    """An unpacked archive on this node, in use until the process ends."""

    folder: Path
    seconds: float
    reused: bool

    @property
    def python(self) -> str:
        """Return the path of the archive's interpreter, or "" if it has none."""
        path = self.folder / "bin" / "python"
        return str(path) if path.is_file() and os.access(path, os.X_OK) else ""


def stage_archive(config: StageConfig, environ: Mapping[str, str], on_wait: OnWait = ignore_wait) -> StagedArchive:
    """Unpack the archive unless this node has it, and delete archives that no job has used for long.

    `on_wait` is called before a wait for another process. Raises NotPrepared with a reason that names the file, the
    place and the remedy.
    """
    started, archive = time.monotonic(), Path(config.archive)
    above = make_own_folder(_KEY, config.to, environ)
    folder = above / f"{_stem(archive)}-{config.sha256[:16]}"
    try:
        lock = FolderLock.use(folder, on_wait)
        reused = (folder / MARKER).exists()
        if not reused:
            lock.release()
            reused = _unpack_once(archive, config, folder, on_wait)
        delete_unused(above, config.keep_days, caches=False)
    except OSError as error:
        if error.filename == str(archive):
            raise NotPrepared(f"cannot stage {archive} to {config.to}: {error_words(error)}") from error
        raise explain_folder_error(_KEY, config.to, error) from error
    place = _single_folder(folder)
    _require_interpreter(archive, place)
    return StagedArchive(folder=place, seconds=time.monotonic() - started, reused=reused)


def _stem(archive: Path) -> str:
    return archive.name[: -len(_ending(archive))]


def _ending(archive: Path) -> str:
    endings = (*_TAR_OPTIONS, ".sqsh", ".squashfs")
    return next(one for one in sorted(endings, key=len, reverse=True) if archive.name.endswith(one))


def _single_folder(folder: Path) -> Path:
    """Return the archive's only folder if `tar -cf env.tar env` made it, else the folder itself."""
    if (folder / "bin").is_dir():
        return folder
    entries = [path for path in folder.iterdir() if path.name != MARKER]
    return entries[0] if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink() else folder


def _require_interpreter(archive: Path, place: Path) -> None:
    """Raise NotPrepared if `bin/python` is a link to a file that this node lacks: ranks would get another Python."""
    python = place / "bin" / "python"
    if python.is_symlink() and not python.exists():
        what = f"bin/python of {archive} is a link that leads nowhere on this node ({os.path.realpath(python)})"
        raise NotPrepared(f"{what}; install that Python here, or pack an environment that has its own")


def _unpack_once(archive: Path, config: StageConfig, folder: Path, on_wait: OnWait) -> bool:
    """Unpack the archive, and return whether another process has done it in the meantime."""
    # A process keeps its shared lock while it lives, so nobody may wait for an exclusive one.
    while (lock := FolderLock.own_unused(folder)) is None:
        shared = FolderLock.use(folder, on_wait)  # waits while another process unpacks
        if (folder / MARKER).exists():
            return True
        shared.release()
        time.sleep(0.05)
    done = (folder / MARKER).exists()
    if not done:
        _unpack(archive, config, lock)
    lock.share()
    return done


def _unpack(archive: Path, config: StageConfig, lock: FolderLock) -> None:
    folder = lock.folder
    delete_tree(folder)
    folder.mkdir(mode=0o700)
    try:
        unpack = _unpack_squashfs if _ending(archive) in (".sqsh", ".squashfs") else _unpack_tar
        digest, failure = unpack(archive, folder)
        folder.chmod(0o700)  # the archive's own entry for it may be read-only
        if digest != config.sha256:
            what = f"{archive} is damaged or has changed: its SHA-256 is {digest}, not {config.sha256}"
            listed = archive.with_name(f"{archive.name}.sha256")
            first = f"delete {listed}, or write it anew; then " if listed.exists() else ""
            raise NotPrepared(f"{what}; {first}`orch resume RUN cluster.stage.sha256=` takes the file as it is now")
        if failure:
            raise _explain(archive, folder, failure)
        _fix_conda_paths(_single_folder(folder))
        write_durably(folder / MARKER, f"{digest}  {archive}\n".encode())
    except (OSError, NotPrepared):
        lock.delete()
        raise


def _explain(archive: Path, folder: Path, failure: str) -> NotPrepared:
    if not any(words in failure for words in _FULL):
        return NotPrepared(f"{archive} cannot be unpacked: {failure}")
    disk = shutil.disk_usage(folder)
    left = f"{disk.free / 1e9:.1f} of {disk.total / 1e9:.1f} GB are free"
    what = f"the disk of {folder.parent} is full while unpacking {archive}: {left} before the part is deleted"
    return NotPrepared(f"{what}; cluster.stage.to=FOLDER chooses another", check=DISK)


def _unpack_tar(archive: Path, folder: Path) -> tuple[str, str]:
    """Read the archive once, for its digest and for tar. Return the digest and tar's error."""
    option = _TAR_OPTIONS[_ending(archive)]
    program = _PROGRAMS.get(option, "tar")
    _require_program(program, archive, "or stage a .tar")
    words = ["tar", "-x", *([option] if option else []), "--no-same-owner", "-C", str(folder)]
    digest = hashlib.sha256()
    with archive.open("rb") as stream, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=_in_english()
        )
        assert process.stdin is not None
        reads = True
        while block := stream.read(_BLOCK):
            digest.update(block)
            try:
                if reads:
                    process.stdin.write(block)
            except BrokenPipeError:  # tar has failed, or it ignores the padding after the archive's end
                reads = False
        try:
            process.stdin.close()
        except BrokenPipeError:
            reads = False
        failure = _describe_failure(process.wait(), errors)
    return digest.hexdigest(), failure


def _unpack_squashfs(archive: Path, folder: Path) -> tuple[str, str]:
    _require_program("unsquashfs", archive, "or stage a .tar.zst")
    with archive.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    words = ["unsquashfs", "-no-progress", "-no-xattrs", "-force", "-dest", str(folder), str(archive)]
    with tempfile.TemporaryFile() as errors:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, check=False, env=_in_english()
        )
        return digest, _describe_failure(done.returncode, errors)


def _in_english() -> dict[str, str]:
    """Return the environment for a program whose messages are compared with `_FULL`."""
    return {**os.environ, "LC_ALL": "C"}


def _require_program(program: str, archive: Path, otherwise: str) -> None:
    if shutil.which(program) is None:
        raise NotPrepared(
            f"{archive} cannot be unpacked: {program} is not installed on this node; install it, {otherwise}"
        )


def _describe_failure(code: int, errors: IO[bytes]) -> str:
    """Return the first line of a program's errors, or one about a full disk, or "" if it succeeded."""
    if code == 0:
        return ""
    errors.seek(0)
    lines = errors.read(1 << 16).decode(errors="replace").strip().splitlines()
    lines = [line for line in lines if _REMARK not in line] or [f"exit code {code}"]
    return next((line for line in lines if any(words in line for words in _FULL)), lines[0])


def _fix_conda_paths(folder: Path) -> None:
    """Run conda-pack's program, which writes the environment's new path into its files, if the archive has it."""
    program = folder / _UNPACK_CONDA
    if not program.exists():
        return
    done = subprocess.run(
        [str(folder / "bin" / "python"), str(program)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise NotPrepared(f"{program} failed: {last}")
