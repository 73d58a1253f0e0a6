"""Runs a program on a checkpoint that it must not change, and reports a verdict; started as a rank of a `command`.

    python restore_program.py PROGRAM [ARGUMENT ...]            the user's own restore program
    python restore_program.py --train COMMAND [ARGUMENT ...]    the run's own command, for some steps (`trial.py`)

$ORCH_CHECKPOINT is the checkpoint's file or folder. Where the kernel allows it, it is read-only for the program; in any
case, its files are listed before and after, and rank 0 compares them with their seal. The exit code 0 of a restore
program means a pass, 7 a bad checkpoint, 75 no result. Any other exit code is a failure of the program, which proves
nothing about the checkpoint.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # started by its path, so orch's packages are not importable otherwise
    sys.path[:] = [str(Path(__file__).resolve().parents[3]), *sys.path[1:]]

from trainer.agent.user_command import trial
from trainer.agent.user_command.private_view import NAMESPACES, ViewError
from trainer.agent.user_command.restored_states import RestoredRanks, compare_losses, read_restored
from trainer.agent.user_command.sealing import Verdict, verify_seal
from trainer.agent.user_command.trial import Trial, has_opened, read_trial
from trainer.agent.user_command.trial_view import enter_view, first_rank
from trainer.protocol.checkpoint_seal import list_files
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.restore_test import CHECKPOINT_VARIABLE, TRAIN, Outcome, RestoreTestOrder, read_order
from trainer.protocol.run_dir import AttemptDir, RunDir

BAD = 7
"""Exit code with which a program reports a bad checkpoint; orch's own commands use it too."""
_SCRATCH, _LOCK = "orch-restore-test-", "held"
"""Beginning of the names of tests' folders, and the file in each that its process locks."""
_NOT_STARTED = {126: "the program cannot be executed", 127: "no such program"}
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, _stop)
    place = find_scratch_place()
    delete_leftovers(Path(place))
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=place))
    held = hold(scratch)
    try:
        return run_test(arguments, scratch)
    except Stopped as error:
        number = error.number
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        delete(scratch)
        os.close(held)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return ExitCode.RETRY  # not reached: the signal ends the process


class Stopped(Exception):  # noqa: N818  # no error: the test is stopped
    """Raised if a signal ends the test or its program; the process dies of it once nothing is left behind."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)


def find_scratch_place() -> str:
    """Return a temporary folder that is in none of the folders for which overlays are made."""
    checkpoint = Path(os.environ[CHECKPOINT_VARIABLE])
    covered = [os.path.realpath(path) for path in (os.getcwd(), os.path.expanduser("~"), checkpoint.parent)]
    place = os.path.realpath(tempfile.gettempdir())
    return "/tmp" if any(Path(place).is_relative_to(folder) for folder in covered) else place  # noqa: S108


def hold(scratch: Path) -> int:
    """Lock a test's folder until this process ends, and return the descriptor. Raises OSError."""
    held = os.open(scratch / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


def delete_leftovers(place: Path) -> None:
    """Delete the folders of this user's earlier tests that were killed, which no process holds."""
    for scratch in place.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # one without a lock is just being made, or it is another user's
            if scratch.stat().st_uid != os.geteuid():
                continue
            found = os.open(scratch / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                delete(scratch)
            finally:
                os.close(found)


def delete(scratch: Path) -> None:
    """Delete what a command has written, also a folder that the kernel has closed."""

    def open_and_delete(_: object, path: str, error: object) -> None:
        with suppress(OSError):
            os.chmod(path, 0o700)
            os.rmdir(path)

    for _ in range(2):  # the second time, all folders are open
        shutil.rmtree(scratch, onerror=open_and_delete)


def run_test(arguments: list[str], scratch: Path) -> int:
    """Run the program or the run's own command, report the verdict, and return the exit code."""
    checkpoint, began = Path(os.environ[CHECKPOINT_VARIABLE]), time.time()
    run = RunDir(Path(os.environ["ORCH_RUN_DIR"]))
    attempt, order, rank = run.attempt(int(os.environ["ORCH_ATTEMPT"])), read_order(run), first_rank()
    trains = arguments[:1] == [TRAIN]
    before, names = list_stamps(checkpoint), set(os.listdir(checkpoint.parent))
    if not before:
        return _give_up(attempt, rank, f"the run has deleted {checkpoint}")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(find_fault, checkpoint, order if rank == 0 else None)
        if trains:
            made, code = run_trial(arguments[1:], attempt, rank, scratch)
            shielded = not made.refused
        else:
            shielded = can_shield(checkpoint)
            prefix = [*_MOUNTS, "sh", "-c", _READ_ONLY, str(checkpoint)] if shielded else []
            code = run_program([*prefix, *arguments], inherit_files() if shielded else ())
        fault = reading.result()
    if code < 0:  # it was killed; the agent knows why
        raise Stopped(-code)
    changed = list_stamps(checkpoint) != before
    if code == ExitCode.RETRY or (changed and shielded):
        # The program cannot have changed it, so another process is still writing to it: no result.
        why = f"another process changes or deletes {checkpoint}"
        return _give_up(attempt, rank, f"exit code {code} of rank {rank}" if code == ExitCode.RETRY else why)
    written = sorted(set(os.listdir(checkpoint.parent)) - names)
    evidence: dict[str, object] = {
        "read_only": shielded, "program_seconds": time.time() - began, "place": str(checkpoint.parent),
    }  # fmt: skip
    restored = read_restored(attempt, int(os.environ.get("ORCH_GENERATION", "0")))
    if fault:
        found = Outcome.CORRUPT, f"{checkpoint.name} {fault}"
    elif trains and order is not None:
        evidence["trained_steps"] = made.steps
        losses = compare_losses(RunDir(Path(order.run_dir)), attempt, str(checkpoint))
        report = Report(
            test=run.name, rank=rank, name=checkpoint.name, restored=restored, losses=losses,
            opened=rank > 0 or has_opened(attempt),
        )  # fmt: skip
        found = judge_trial(made, code, order, report)
        if written and not made.refused and found[0] not in (Outcome.RESTORED, Outcome.CORRUPT):
            why = f"the run has written {written[0]} meanwhile, which the command may have loaded"
            return _give_up(attempt, rank, why)
    else:
        found = judge(code, changed, rank, checkpoint.name, restored)
    _report(attempt, rank, *found, evidence)
    return code or (1 if changed else 0)


def _give_up(attempt: AttemptDir, rank: int, why: str) -> int:
    """Report that the test has no result, and return the exit code."""
    sys.stderr.write(f"orch: no result: {why}\n")
    _report(attempt, rank, Outcome.NOT_FINISHED, f"no result: {why}", {})
    return ExitCode.RETRY


def run_trial(command: list[str], attempt: AttemptDir, rank: int, scratch: Path) -> tuple[Trial, int]:
    """Run the own command in the node's view, and return its result and exit code."""
    if not can_unshare(NAMESPACES):
        return Trial(refused=f"no namespaces of its own ({' '.join(NAMESPACES)})"), 1
    try:
        words = [*enter_view(attempt, scratch), sys.executable, trial.__file__, os.getcwd(), *command]
        code = run_program(words, inherit_files())
        return (read_trial(attempt, rank) if code >= 0 else Trial()), code
    except ViewError as error:
        return Trial(refused=str(error)), 1
    except (OSError, ValueError) as error:
        return Trial(refused=f"the test's own process failed: {error}"), 1


def find_fault(checkpoint: Path, order: RestoreTestOrder | None) -> str:
    """Return how a checkpoint differs from its seal, or "" if it does not or has none."""
    if order is None:
        return ""
    with suppress(OSError):  # unreadable files are no damage; the program shows them
        # The run may train and write it again meanwhile.
        found = verify_seal(RunDir(Path(order.run_dir)).seals, checkpoint, program_until=time.time_ns())
        return found.reason if found.verdict is Verdict.DAMAGED else ""
    return ""


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


def run_program(words: list[str], descriptors: Sequence[int] = ()) -> int:
    """Return the exit code of a program, or the code a shell would return if it cannot be started."""
    try:
        return subprocess.run(words, check=False, pass_fds=descriptors).returncode
    except FileNotFoundError:
        return 127
    except PermissionError:
        return 126


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


@dataclass(frozen=True, kw_only=True)
class Report:
    """Reports of the ranks of a test."""

    test: str
    rank: int
    name: str  # of the checkpoint, as the user knows it
    restored: RestoredRanks
    losses: str  # comparison with those of the run; empty: unknown
    opened: bool  # a process has opened a file of the checkpoint; rank 0 knows


def judge_trial(made: Trial, code: int, order: RestoreTestOrder, report: Report) -> tuple[Outcome, str]:
    """Return the verdict on a checkpoint from which the run's own command has trained."""
    name, steps = report.name, f"{made.steps} step{'s' * (made.steps != 1)}"
    if made.refused:
        return Outcome.NOT_COMPARABLE, f"the command was not started: {made.refused} (or set restore_tests.command)"
    known = report.restored
    compared = f"{known.describe(name)}; " if known.agree and not known.differ else ""
    if code:
        why = _NOT_STARTED.get(code, f"the command failed after {steps}")
        which = f"exit code {code} of rank {report.rank} (orch logs {report.test})"
        return Outcome.NOT_COMPARABLE, f"{compared}{why}: {which}"
    if made.steps and not report.opened:  # its parameters come from another file
        why = f"nothing shows that it loaded {name}: no process has opened its files"
        return Outcome.NOT_COMPARABLE, f"it trained {steps}, but {why}"
    if known.differ:
        return (Outcome.SUSPECT if known.agree else Outcome.NOT_COMPARABLE), known.describe(name)
    if not made.steps:
        return Outcome.NOT_COMPARABLE, "the command ended with exit code 0 before its first step"
    continues = bool(made.restored) and all(step == order.step for step in made.restored)
    if not known.agree and not continues:
        return Outcome.NOT_COMPARABLE, f"it trained {steps}, but nothing shows that it continued from {name}"
    where = f" continued from step {order.step} and" if continues else ""
    ended = ", and ended" if made.ended else ""
    return Outcome.RESTORED, f"{compared}the command{where} trained {steps}{ended}{report.losses}"


_MOUNTS = ("unshare", "-rm")
"""Words that start a process in user and mount namespaces of its own."""


def can_unshare(namespaces: Sequence[str] = _MOUNTS) -> bool:
    """Return whether this process may have these namespaces of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*namespaces, "true"], capture_output=True, check=False).returncode == 0


def can_shield(checkpoint: Path) -> bool:
    """Return whether a private namespace can make the checkpoint read-only here."""
    words = [*_MOUNTS, "sh", "-c", _READ_ONLY, str(checkpoint), "true"]
    return can_unshare() and subprocess.run(words, capture_output=True, check=False).returncode == 0


def list_stamps(checkpoint: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, time of the last change and inode of each file; none if it is gone. Raises OSError."""
    try:
        found = {name: path.stat() for name, path in list_files(checkpoint).items()}
    except FileNotFoundError:
        return {}
    return {name: (now.st_size, now.st_mtime_ns, now.st_ino) for name, now in found.items()}


def _report(attempt: AttemptDir, rank: int, outcome: Outcome, reason: str, evidence: dict[str, object]) -> None:
    """Report the result: only rank 0 reports a pass, but every rank reports a failure."""
    if rank and outcome is Outcome.RESTORED:
        return
    events = EventLog(attempt.event_file(f"restore-test-{rank:05d}"), f"restore-test-{rank:05d}", attempt.number)
    events.write(EventKind.RESTORE_TESTED, verdict=str(outcome), reason=reason, evidence=evidence)
    events.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
