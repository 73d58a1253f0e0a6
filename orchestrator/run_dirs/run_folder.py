"""Run directory: creation, repair, ownership and free space."""

import errno
import os
import re
import shlex
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import (
    canonical,
    dump_line,
    fsync_dir,
    fsync_file,
    only_own_files,
    read_json,
    temporary_folder,
    write_durably,
)
from checkpointing.storage.storage_errors import disk_words, write_probe
from checkpointing.storage.trusted_path import NotPrivate, check_private, is_trusted, pin_path_temporarily, user_name
from checkpointing.verification.verify import verify_checkpoint
from orchestrator import failpoints
from orchestrator.errors import ConfigError, Precondition
from orchestrator.registry.records import Attempt, Run
from orchestrator.run_dirs import staged_secrets
from trainer.protocol import skipped_batches
from trainer.protocol.restore_test import write_order
from trainer.protocol.run_dir import RunDir
from trainer.protocol.skipped_batches import Skip

T = TypeVar("T")


class ForeignFolder(Exception):
    """Raised if a run directory belongs to another user or was replaced during a read."""


def in_own_folder(folder: Path, work: Callable[[], T]) -> T:
    """Return the result of `work` without reading others' files. Raises ForeignFolder, or whatever `work` raises."""
    before = _identity(folder)
    with only_own_files():
        value = work()
    if before is not None and _identity(folder) not in (None, before):
        raise ForeignFolder(f"the run directory was replaced while it was read: {folder}")
    return value


def foreign_reason(folder: Path) -> str:
    """Return why a run directory must not be used; empty if it is usable or missing."""
    try:
        _identity(folder)
    except ForeignFolder as error:
        return str(error)
    return ""


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return the folder's device and inode; None if it is missing. A link to it must also belong to the user."""
    try:
        for status in (os.lstat(folder), found := os.stat(folder)):
            if not is_trusted(status.st_uid):
                raise ForeignFolder(f"the run directory belongs to {user_name(status.st_uid)}: {folder}")
    except OSError:  # the next use will report the error
        return None
    return found.st_dev, found.st_ino


LEAST = 1 << 18  # bytes for a job's small files; with less, the job cannot even report why it exits
_MOST_PROBED = 64 << 20  # maximum bytes written as a probe; above that, the file system's own figure decides


def missing_room(folder: RunDir, checkpoint: int) -> str:
    """Return why no job can start in this run's folder (`disk full ...`); empty if a job can.

    `checkpoint`: bytes of a checkpoint that must fit in addition to the job's small files; 0 if none has to fit.
    """
    free = _free(folder) if checkpoint else None
    if free is not None and free < checkpoint + LEAST:
        left, wanted = free / (1 << 20), checkpoint / (1 << 20)
        room = f"{left:.1f} MiB are free; a checkpoint needs {wanted:.1f} MiB"
        return f"{disk_words(errno.ENOSPC)}: {room} ({folder.path})"
    return write_probe(folder.path, min(checkpoint + LEAST, _MOST_PROBED))


def _free(folder: RunDir) -> int | None:
    """Return the free bytes, plus those that the next job frees first; None if the file system does not report them."""
    from checkpointing.retention.garbage import find_debris  # storage backends, needed only after a full disk
    from checkpointing.tiers.catalog import Catalog  # likewise

    try:
        usage = shutil.disk_usage(folder.path)
        debris = sum(item.bytes for item in find_debris(Catalog(folder.checkpoints)))
    except OSError:
        return None
    return usage.free + debris if usage.total else None


_DRAFT = re.compile(r"\..+\.[0-9a-f]{8}(\..+)?\.[0-9a-f]{8}\.tmp")
_ABANDONED = 86400.0  # seconds after which a draft counts as abandoned


def check_run_folder(run: Run, first: Attempt) -> str:
    """Check the folder of a submitted run; return why this host cannot check it, empty if it can.

    A missing mount looks like an empty folder, and the run's own `run.json` proves that it is mounted. If only that
    file was deleted, the first attempt's intent is the proof, and the file is written again.
    """
    folder, host = RunDir(Path(run.run_dir)), socket.gethostname()
    if why := foreign_reason(folder.path):
        return f"{why} (seen on {host})"
    try:
        owner = read_json(folder.run)
    except FileNotFoundError:
        if not folder.attempts.is_dir():
            return f"the run directory is not visible on {host}: {folder.path}"
        return _restore_run_json(folder, run, first)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"the run directory cannot be read on {host}: {folder.run}: {why}"
    if not isinstance(owner, dict) or owner.get("nonce") != first.nonce:
        return f"the run directory on {host} is another run's: {folder.path}"
    return ""


def _restore_run_json(folder: RunDir, run: Run, first: Attempt) -> str:
    """Write `run.json` again into the run's own folder; return why that is impossible, or ""."""
    intent = folder.attempt(first.number).path / "intent.json"
    try:
        if read_json(intent)["nonce"] == first.nonce:
            write_durably(folder.run, dump_line(_run_json(run, first)).encode())
            return ""
        why = "is another run's"
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, LookupError, TypeError):
        why = "is damaged"
    return f"{folder.run} is missing and cannot be rewritten: {intent}: {why}"


def name_in_folder(folder: Path) -> str:
    """Return the name of the run that owns this folder; empty if no run does."""
    found = _read_run_json(RunDir(folder))
    return str(found.get("name", "")) if "nonce" in found else ""


def refuse_within_run(place: Path, key: str, own: Path | None = None) -> None:
    """Raise ConfigError for a path inside another run's folder, because `orch rm` of that run would delete it."""
    for folder in (place, *place.parents):
        if folder != own and (name := name_in_folder(folder)):
            what = f"{place} is inside the folder of the run {name}: `orch rm {name}` would delete it too"
            raise ConfigError(what, where=key, hint=f"choose a folder outside {folder}")


def ensure_run_dir(run: Run, first: Attempt, config: dict[str, Any]) -> RunDir:
    """Create a run's folder, unless it exists, with the first attempt's `config`.

    The folder is built as a draft next to its final path and then renamed, so no reader sees it half built. The
    submitter and a controller may do this at the same time on two machines. Each has its own draft, and the slower
    process uses the faster one's folder, whatever error it ran into. Either process then moves the staged secrets into
    the folder. Raises Precondition if another run's folder has this path.
    """
    final = RunDir(Path(run.run_dir))
    if not final.run.exists():
        failpoints.reach("before_folder")
        try:
            _make(final, run, first, config)
        except Precondition:
            if not final.path.exists():
                raise
        except OSError as error:
            if not final.path.exists():
                hint = "make cluster.root writable, or choose another folder with cluster.root=FOLDER"
                what = f"cannot create the run's folder: {error.strerror or error}"
                raise Precondition(what, where=str(final.path), hint=hint) from error
        fsync_dir(final.path.parent)
        _sweep_abandoned(final.path.parent)
        failpoints.reach("after_folder")
    _check_owner(final, run, first)
    staged_secrets.adopt(final, first.nonce)
    return final


def _make(final: RunDir, run: Run, first: Attempt, config: dict[str, Any]) -> None:
    """Build the folder as a draft and rename it. Raises OSError if it already exists."""
    # A missing root may be unmounted, so it is never created.
    with temporary_folder(final.path.parent, f"{run.name}.{first.nonce}", mode=0o700) as path:
        draft = RunDir(path)
        draft.make()
        write_durably(draft.config, canonical(config))
        _copy_code(draft, config, run.identity.get("restore_test"))
        _import_checkpoint(draft, run)
        if order := run.identity.get("restore_test"):
            write_order(draft, order)
            staged_secrets.copy_to_test(order, config.get("env_from", ()), draft)
        write_durably(draft.run, dump_line(_run_json(run, first)).encode())
        ensure_attempt_dir(draft, first, config)
        if skipped := (run.identity.get("imported") or {}).get("skipped"):  # by the run that saved the checkpoint
            skipped_batches.add(draft.attempt(first.number), [Skip(**fields) for fields in skipped])
        os.rename(draft.path, final.path)


def _sweep_abandoned(root: Path) -> None:
    """Remove abandoned drafts of any run, because a killed process's machine may never create a folder here again."""
    for path in root.iterdir():
        with suppress(OSError):
            if _DRAFT.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


def _check_owner(folder: RunDir, run: Run, first: Attempt) -> None:
    try:
        check_private(folder.path)
    except NotPrivate as error:
        elsewhere = "another user's: submit with another --name or cluster.root"
        hint = f"`chmod go-w {shlex.quote(str(folder.path))}` makes a folder of yours private; {elsewhere}"
        what = f"the folder of {run.name} is not private: {error.strerror}"
        raise Precondition(what, where=str(folder.path), hint=hint) from error
    if _read_run_json(folder).get("nonce") != first.nonce:
        hint = "another registry created it: import it with `orch db rebuild`, or submit with another "
        what = f"the folder of {run.name} belongs to another run"
        raise Precondition(what, where=str(folder.path), hint=f"{hint}--name or cluster.root")


def _read_run_json(folder: RunDir) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = read_json(folder.run)
        return found if isinstance(found, dict) else {}
    return {}


def _run_json(run: Run, first: Attempt) -> dict[str, Any]:
    copied = (
        "name", "cluster", "created_at", "total_steps", "scheduler", "identity", "predecessor",
        "predecessor_created_at", "sweep",
    )  # fmt: skip
    fields = {name: getattr(run, name) for name in copied} | {"tags": list(run.tags)}
    return {"schema": "orch.run/1", "config_digest": first.config_digest, "nonce": first.nonce, **fields}


def ensure_attempt_dir(
    folder: RunDir, attempt: Attempt, config: dict[str, Any], run_config: dict[str, Any] | None = None
) -> None:
    """Create an attempt's folder with `intent.json`, and its config if it differs from the run's. Repeatable.

    `run_config`: the run's config, for an attempt that is smaller than its run.
    """
    place = folder.attempt(attempt.number)
    place.make()
    if run_config is not None:
        write_durably(place.run_config, canonical(run_config))
    else:
        place.run_config.unlink(missing_ok=True)  # the run's config changed before this attempt was submitted
    content = canonical(config)
    try:
        known = folder.attempt_config(attempt.number).read_bytes() == content
    except FileNotFoundError:  # a user removed the file; the registry still has the config
        known = False
    if not known:
        write_durably(place.config, content)
    intent = place.path / "intent.json"
    if not intent.exists():
        fields = {
            "schema": "orch.intent/1", "attempt": attempt.number, "nonce": attempt.nonce,
            "job_name": attempt.job_name, "excluded": list(attempt.excluded), "scheduler": attempt.scheduler,
            "at": attempt.intent_at,
        }  # fmt: skip
        write_durably(intent, dump_line(fields).encode())


def _import_checkpoint(folder: RunDir, run: Run) -> None:
    """Import the run's initial checkpoint, by hard links if possible.

    Raises Precondition if that checkpoint is gone or being deleted: the run would otherwise start from scratch.
    """
    imported = run.identity.get("imported")
    if imported is None:
        return
    source = Path(imported["checkpoint"])
    target = folder.checkpoints / source.name
    try:
        shutil.copytree(source, target, copy_function=_link_or_copy)
        lost = ""
    except FileNotFoundError as error:
        lost = f"{error.filename} is gone"
    except shutil.Error as error:
        if not source.is_dir() or all(Path(item[0]).exists() for item in error.args[0]):
            raise
        lost = "some of its files are gone"
    faults = [] if lost else verify_checkpoint(LocalStorage(folder.checkpoints), source.name, 0).faults
    if lost or faults:
        hint = "it has been deleted, or is damaged: start from another checkpoint (`orch ckpt pin` keeps one)"
        what = f"the checkpoint that {run.name} starts from cannot be used: {lost or faults[0]}"
        raise Precondition(what, where=str(source), hint=hint)
    fsync_dir(target)
    fsync_dir(folder.checkpoints)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        fsync_file(Path(target))


def _copy_code(folder: RunDir, config: dict[str, Any], order: dict[str, Any] | None) -> None:
    """Copy the folders of `workload.path` to `code/0`, `code/1`, ... if the config requests it.

    A restore test copies the code of the run under test.
    """
    workload = config.get("workload", {})
    if not workload.get("snapshot"):
        return
    tested = Path(order["run_dir"]) if order else None
    with pin_path_temporarily(tested) if tested else nullcontext(None) as place:
        for index, source in enumerate(map(Path, workload.get("path", ()))):
            if tested and place and source.is_relative_to(tested):
                source = place / source.relative_to(tested)
            _copy_tree(source, folder.code / str(index))


def _copy_tree(source: Path, target: Path) -> None:
    try:
        shutil.copytree(source, target, ignore=_not_copied, symlinks=True)
    except shutil.Error as error:
        unread = [item for item in error.args[0] if not os.access(item[0], os.R_OK) and os.path.lexists(item[0])]
        if not unread:
            raise
        raise _unreadable(unread[0][0]) from error


def check_readable_code(folders: Iterable[Path]) -> None:
    """Raise Precondition if part of the code cannot be copied for `workload.snapshot`."""
    for folder in folders:
        for place, below, names in os.walk(folder):
            ignored = _not_copied(place, [*below, *names])
            below[:] = [name for name in below if name not in ignored]
            for path in (Path(place) / name for name in (*below, *names) if name not in ignored):
                if not path.is_symlink() and not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
                    raise _unreadable(str(path))


_NOT_CODE = shutil.ignore_patterns("__pycache__", "*.pyc", ".git", ".venv", ".mypy_cache", ".ruff_cache")


def _not_copied(place: str, names: list[str]) -> set[str]:
    """Return build products, pipes, sockets and other entries that are not code."""
    ignored = set(_NOT_CODE(place, names))
    for name in names:
        with suppress(OSError):
            mode = os.lstat(os.path.join(place, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                ignored.add(name)
    return ignored


def _unreadable(path: str) -> Precondition:
    what = f"workload.snapshot: {path} cannot be read or copied"
    return Precondition(what, where="workload.path", hint=f"`chmod u+rX {shlex.quote(path)}`, or move it elsewhere")
