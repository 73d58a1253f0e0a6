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
from pathlib import Path

if __name__ == "__main__":  # started by its path, so orch's packages are not importable otherwise
    sys.path[:] = [str(Path(__file__).resolve().parents[3]), *sys.path[1:]]

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
    code = run([*prefix, *program])
    if code < 0:  # it was killed; the agent knows why
        os.kill(os.getpid(), signal.Signals(-code))
    changed = content(checkpoint) != before
    if code == ExitCode.RETRY or (changed and shielded):
        # The program cannot have changed it, so another process is still writing to it: no result.
        why = f"exit code {code}" if code else "another process writes to it"
        sys.stderr.write(f"orch: no result: {why}\n")
        return ExitCode.RETRY
    evidence = {"read_only": shielded, "program_seconds": time.time() - began, "place": str(checkpoint.parent)}
    _report(*judge(code, changed, int(os.environ.get("RANK", "0"))), evidence)
    return code or (1 if changed else 0)


def run(words: list[str]) -> int:
    """Return the exit code of a program, or the code a shell would return if it cannot be started."""
    try:
        return subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        return 127
    except PermissionError:
        return 126


def judge(code: int, changed: bool, rank: int) -> tuple[Outcome, str]:
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
    return Outcome.RESTORED, "the program restored it: exit code 0"


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
