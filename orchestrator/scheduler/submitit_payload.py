"""submitit's pickle: the function that a job calls, and the file name under which the job looks for it."""

import importlib
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointing.storage.durable import fsync_dir, write_durably
from checkpointing.storage.trusted_path import NotPrivate, pin_path_temporarily
from orchestrator.errors import Precondition
from orchestrator.scheduler.interface import JobSpec

AGENT = "trainer.agent.main:run_agent"
_SCRIPT = re.compile(r"(\d+)_submission\.sh", re.ASCII)
_ORPHAN = re.compile(r"[0-9a-f]{32}\.pkl")


def load_entry(entry: str) -> Callable[[str, str], None]:
    """Return the function `module:name`, which submitit pickles by this reference."""
    module, _, name = entry.partition(":")
    function: Callable[[str, str], None] = getattr(importlib.import_module(module), name)
    return function


def arguments(spec: JobSpec) -> tuple[str, str]:
    """Return the two string arguments of the function."""
    return str(spec.run_dir), str(spec.attempt)


def start_command(run_dir: Path | str, submission: Path | str) -> str:
    """Return the words after the interpreter in a job's script: they check the folder, then load the payload."""
    return f"-u -m trainer.agent.main {shlex.quote(str(run_dir))} {shlex.quote(str(submission))}"


@contextmanager
def own_folder(spec: JobSpec) -> Iterator[Path]:
    """Yield the submission folder under a name pinned to it; raises Precondition if it is not private to this user."""
    try:
        spec.submission.mkdir(mode=0o700, exist_ok=True)
        with pin_path_temporarily(spec.run_dir) as place:
            yield place / spec.submission.relative_to(spec.run_dir)
    except NotPrivate as error:
        raise Precondition(
            f"the run directory is not private: {error.strerror}",
            where=str(spec.run_dir),
            hint=f"ask who changed it; `chmod go-w {shlex.quote(str(spec.run_dir))}` closes it if it is yours",
        ) from error


def find_job_ids(submission: Path) -> set[str]:
    """Return ids of jobs that submitit submitted from this folder; it names its script after sbatch's answer."""
    try:
        found = [_SCRIPT.fullmatch(name) for name in os.listdir(submission)]
    except OSError:
        return set()
    return {match[1] for match in found if match}


def adopt_payload(submission: Path, job_id: str) -> None:
    """Give the job its payload under the name that it looks for; harmless if it exists.

    submitit renames `<uuid>.pkl` only after a clean sbatch. All payloads of one submission folder are equal, so any
    will do. A hard link appears in one step, and keeps the orphan for a duplicate job that may appear later.
    """
    wanted = submission / f"{job_id}_submitted.pkl"
    if wanted.exists():
        return
    names = sorted(os.listdir(submission)) if submission.is_dir() else []
    found = [name for name in names if _ORPHAN.fullmatch(name) or name.endswith("_submitted.pkl")]
    if not found:
        raise Precondition(
            f"the payload of job {job_id} is missing: no *.pkl in {submission}",
            hint=f"scancel {job_id}: without it the job would fail after a minute",
        )
    try:
        os.link(submission / found[0], wanted)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        write_durably(wanted, (submission / found[0]).read_bytes())
    fsync_dir(submission)
