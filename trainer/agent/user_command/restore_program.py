"""Runs a user's own restore program on a checkpoint that it must not change; started as a rank of a `command`.
    python restore_program.py PROGRAM [ARGUMENT ...]      with $ORCH_CHECKPOINT, the checkpoint's file or folder
Where the kernel allows it, the checkpoint is read-only for the program; in any case, a digest of its bytes is taken
before and after. The program's exit code 0 means a pass, 7 a bad checkpoint, 75 no result. Any other exit code is a
failure of the program, which proves nothing about the checkpoint.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # started by its path, so orch's packages are not importable otherwise
    sys.path[:] = [str(Path(__file__).resolve().parents[3]), *sys.path[1:]]

from trainer.agent.user_command.restored_states import RestoredRanks, read_restored
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.restore_test import CHECKPOINT_VARIABLE, Outcome
from trainer.protocol.run_dir import RunDir

BAD = 7
"""Exit code with which a program reports a bad checkpoint; orch's own commands use it too."""
_NOT_STARTED = {126: "the program cannot be executed", 127: "no such program"}
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def main(program: list[str]) -> int:
    checkpoint, began = Path(os.environ[CHECKPOINT_VARIABLE]), time.time()
    before = content(checkpoint)
    shielded = can_shield(checkpoint)
    prefix = ["unshare", "-rm", "sh", "-c", _READ_ONLY, str(checkpoint)] if shielded else []
    code = run([*prefix, *program], inherit_files() if shielded else ())
    if code < 0:  # it was killed; the agent knows why
        os.kill(os.getpid(), signal.Signals(-code))
    changed = content(checkpoint) != before
    if code == ExitCode.RETRY or (changed and shielded):
        # The program cannot have changed it, so another process is still writing to it: no result.
        why = f"exit code {code}" if code else "another process writes to it"
        sys.stderr.write(f"orch: no result: {why}\n")
        return ExitCode.RETRY
    evidence = {"read_only": shielded, "program_seconds": time.time() - began, "place": str(checkpoint.parent)}
    _report(*judge(code, changed, int(os.environ.get("RANK", "0")), checkpoint.name, _read_restored()), evidence)
    return code or (1 if changed else 0)


def inherit_files() -> list[int]:
    """Open the agent's files for the program, which cannot open them by path from its own user namespace."""
    opened = []
    for name in ("ORCH_CELLS", "ORCH_STACKS"):
        paths = []
        for path in filter(None, os.environ.get(name, "").split(",")):
            opened.append(os.open(path, os.O_RDWR))
            paths.append(f"/proc/self/fd/{opened[-1]}")
        os.environ[name] = ",".join(paths)
    return opened


def run(words: list[str], descriptors: Sequence[int] = ()) -> int:
    """Return the exit code of a program, or the code a shell would return if it cannot be started."""
    try:
        return subprocess.run(words, check=False, pass_fds=descriptors).returncode
    except FileNotFoundError:
        return 127
    except PermissionError:
        return 126


def _read_restored() -> RestoredRanks:
    """Return which ranks have the parameters that they saved, as far as their start-up modules have compared them."""
    attempt = RunDir(Path(os.environ["ORCH_RUN_DIR"])).attempt(int(os.environ["ORCH_ATTEMPT"]))
    return read_restored(attempt, int(os.environ.get("ORCH_GENERATION", "0")))


def judge(
    code: int, changed: bool, rank: int, name: str = "", restored: RestoredRanks | None = None
) -> tuple[Outcome, str]:
    """Return the verdict on the checkpoint with this name. `restored` is what the ranks have compared."""
    if code == BAD:
        return Outcome.SUSPECT, f"the program found it bad: exit code {BAD} of rank {rank}"
    if code in _NOT_STARTED:
        where = "restore_tests.command"
        return Outcome.NOT_COMPARABLE, f"exit code {code} of rank {rank}: {_NOT_STARTED[code]} ({where})"
    if code:
        bad = f"{BAD} means a bad checkpoint"
        return Outcome.NOT_COMPARABLE, f"the program failed: exit code {code} of rank {rank} ({bad})"
    if changed:
        return Outcome.NOT_COMPARABLE, "the checkpoint changed meanwhile: by the program or by a run that writes to it"
    known = restored if restored is not None and (restored.agree or restored.differ) else None
    if known is not None and rank in known.differ:
        # If no rank has the parameters of its save, the program may store them with less precision.
        outcome = Outcome.SUSPECT if known.agree else Outcome.NOT_COMPARABLE
        return outcome, f"{known.describe(name)} (the program ended with exit code 0)"
    compared = f"; {known.describe(name)}" if known is not None and not known.differ else ""
    return Outcome.RESTORED, f"the program restored it: exit code 0{compared}"


def can_shield(checkpoint: Path) -> bool:
    """Return whether a private namespace can make the checkpoint read-only here."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-rm", "sh", "-c", _READ_ONLY, str(checkpoint), "true"], capture_output=True, check=False
    )  # fmt: skip
    return tried.returncode == 0


def content(checkpoint: Path) -> str:
    """Return a digest of every name and byte of a file or folder."""
    total = hashlib.sha256()
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file()) if checkpoint.is_dir() else [checkpoint]
    for path in files:
        total.update(str(path.relative_to(checkpoint)).encode())
        with path.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _report(outcome: Outcome, reason: str, evidence: dict[str, object]) -> None:
    """Report the result: only rank 0 reports a pass, but every rank reports a failure."""
    rank = int(os.environ.get("RANK", "0"))
    if rank and outcome is Outcome.RESTORED:
        return
    attempt = RunDir(Path(os.environ["ORCH_RUN_DIR"])).attempt(int(os.environ["ORCH_ATTEMPT"]))
    events = EventLog(attempt.event_file(f"restore-test-{rank:05d}"), f"restore-test-{rank:05d}", attempt.number)
    events.write(EventKind.RESTORE_TESTED, verdict=str(outcome), reason=reason, evidence=evidence)
    events.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
