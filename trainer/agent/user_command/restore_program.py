"""Runs a user's own restore program against a checkpoint that it must not change; started as a rank of a `command`.

    python restore_program.py PROGRAM [ARGUMENT ...]      with $ORCH_CHECKPOINT, the checkpoint's file or folder

Where the kernel allows it, the checkpoint is read-only for the program; everywhere its bytes are digested before and
after. Exit code 0 of the program is a pass, 75 says that nothing was found out, any other one that it failed.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # started by its path: where orch's packages are, only that tells
    sys.path[:] = [str(Path(__file__).resolve().parents[3]), *sys.path[1:]]

from trainer.contract.events import EventKind, EventLog
from trainer.contract.failures.outcome import ExitCode
from trainer.contract.restore_test import CHECKPOINT_VARIABLE, Outcome
from trainer.contract.run_dir import RunDir

_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def main(program: list[str]) -> int:
    """Run the program as this rank; returns its exit code."""
    checkpoint, began = Path(os.environ[CHECKPOINT_VARIABLE]), time.time()
    before = content(checkpoint)
    shielded = can_shield(checkpoint)
    prefix = ["unshare", "-rm", "sh", "-c", _READ_ONLY, str(checkpoint)] if shielded else []
    code = subprocess.run([*prefix, *program], check=False).returncode
    if code < 0:  # killed: by whom, the agent knows
        os.kill(os.getpid(), signal.Signals(-code))
    changed = "" if content(checkpoint) == before else "the program changed the checkpoint"
    if code == ExitCode.RETRY or (changed and shielded):
        # What cannot have been this program was somebody else, who still writes: nothing is known.
        why = f"exit code {code}" if code else "somebody else writes to it"
        sys.stderr.write(f"orch: nothing was found out: {why}\n")
        return ExitCode.RETRY
    _report(
        code, changed, {"read_only": shielded, "program_seconds": time.time() - began, "place": str(checkpoint.parent)}
    )
    return code or (1 if changed else 0)


def can_shield(checkpoint: Path) -> bool:
    """Whether a namespace of our own can make it read-only here."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-rm", "sh", "-c", _READ_ONLY, str(checkpoint), "true"], capture_output=True, check=False
    )  # fmt: skip
    return tried.returncode == 0


def content(checkpoint: Path) -> str:
    """A digest of every name and byte of a file or a folder."""
    total = hashlib.sha256()
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file()) if checkpoint.is_dir() else [checkpoint]
    for path in files:
        total.update(str(path.relative_to(checkpoint)).encode())
        with path.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _report(code: int, changed: str, evidence: dict[str, object]) -> None:
    """A pass is rank 0's to tell; what went wrong, any rank's."""
    rank = int(os.environ.get("RANK", "0"))
    wrong = changed or (f"exit code {code} of rank {rank}" if code else "")
    if rank and not wrong:
        return
    attempt = RunDir(Path(os.environ["ORCH_RUN_DIR"])).attempt(int(os.environ["ORCH_ATTEMPT"]))
    events = EventLog(attempt.event_file(f"restore-test-{rank:05d}"), f"restore-test-{rank:05d}", attempt.number)
    events.write(
        EventKind.RESTORE_TESTED, verdict=str(Outcome.SUSPECT if wrong else Outcome.RESTORED),
        reason=wrong or "the program restored it: exit code 0", evidence=evidence,
    )  # fmt: skip
    events.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
