"""Calls of a user's own code outside of a rank: what it raises is shown as its own, with its file and line."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from trainer.worker.workload import WorkloadError

_OURS = Path(__file__).parents[2]
_LONGEST = 500


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Whatever is raised inside becomes a WorkloadError that says that `what` raised it, and where.

    What it prints goes to stderr: stdout belongs to the command's answer.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except WorkloadError as error:
        cause = error.__cause__
        raise WorkloadError(f"{error}{_place(cause) if cause is not None else ''}") from cause
    except (Exception, SystemExit) as error:  # noqa: BLE001  # outermost edge of the user's code
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        said = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."
        raise WorkloadError(f"{what} raised {' '.join(said.split())}{_place(error)}") from error


def _place(error: BaseException) -> str:
    """` at FILE:LINE`: the innermost line that is neither ours nor a library's, or of the module that has no syntax."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


def _is_library(name: str) -> bool:
    path = Path(name)
    ours = any(path.is_relative_to(_OURS / package) for package in ("orch", "orchestrator", "trainer", "checkpointing"))
    return ours or "site-packages" in path.parts or name.startswith(("<", sys.prefix, sys.base_prefix))
