"""Finds the rank exit that caused a generation's failure, and the kind of failure. Pure."""

import re
import signal
from collections.abc import Sequence

from checkpointing.errors import (
    NothingFits,
    NothingIntact,
    NothingVerifies,
    SaveFailed,
    TierUnavailable,
    UnreadableNow,
    UnsavableState,
)
from trainer.protocol.cut_text import cut
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.failure_patterns import VARYING, Meaning, has_meaning
from trainer.protocol.failures.outcome import LOSS_SPIKE, MORE_MEMORY, ExitCode, Failure, FailureKind
from trainer.protocol.failures.rank_end import GOOD, RankEnd, signal_name
from trainer.protocol.skipped_batches import Skip

_NOT_STARTED = (126, 127)
_CHECKPOINTS = frozenset(
    one.__name__ for one in (SaveFailed, NothingVerifies, NothingIntact, UnreadableNow, TierUnavailable)
)
"""Exceptions raised if the run's checkpoints cannot be written, or none can be trusted."""
_CODE_ERRORS = frozenset(
    {"AssertionError", "AttributeError", "IndexError", "KeyError", "NameError", "TypeError", "ValueError"}
)
"""Exceptions that the code itself causes, whatever their messages say. No disk error raises them."""
_BAD_STEPS = ("BadStep", LOSS_SPIKE)
"""Raised by every rank when the reduced loss is unusable."""
_RESERVED = (ExitCode.STORAGE, ExitCode.RETRY, ExitCode.NODE_SUSPECT, ExitCode.NEVER_RETRY)
_LESS_GPU_MEMORY = (
    "use less GPU memory (train.micro_batch_size, train.activation_checkpointing=true), or shard the model over more "
    "ranks (parallel.dp_shard, parallel.tp)"
)
_LESS_MEMORY = "give the job more (cluster.mem), or reduce the program's use, for example with smaller batches"
LIMITS = "`ulimit -u` and pids.max of the job's cgroup limit a user's threads and processes there"


def find_cause(ends: Sequence[RankEnd], *, trained: bool, last_mark: str = "", restored: int = 0) -> Decision:
    """Return the cause among `ends`, at least one of which is bad.
    `trained` means that the run is known to have trained at least one step. `last_mark` is the `mark` of the previous
    failure, and `restored` is the step from which the generation started.
    """
    root = find_root(ends)
    kind, retry, what = _classify(root)
    error = f"{root.exception}: {root.message}" if root.exception else ""
    # Before a generation's first step, errors of the same class can have many causes.
    words = VARYING.sub("#", error) if not root.step or root.step <= restored else root.exception
    mark = f"{words or root.signal or root.exit_code}@{root.step}"
    # A run that has trained has shown that its code works.
    outside = kind is FailureKind.EXCEPTION and trained and root.exception not in _CODE_ERRORS and is_outside(error)
    outside = outside or (kind is FailureKind.UNKNOWN and _meets_limit(root, error))  # this may be temporary, too
    kind = FailureKind.UNKNOWN if outside else kind
    # A new job waits until a replaced installation is complete, and never mixes the old and the new one.
    if kind is FailureKind.EXCEPTION and trained and has_meaning(error, Meaning.INSTALLATION):
        kind, retry, what = FailureKind.STORAGE, False, f"could not read its installation: {_short(error)}"
    own_exception = kind in (FailureKind.EXCEPTION, FailureKind.OUT_OF_MEMORY)
    # Nothing has worked yet, so retrying is unlikely to help.
    if own_exception and not trained:
        retry, what = False, f"{what}, before the first step"
    # A deterministic bug recurs at the same step.
    elif own_exception and mark == last_mark:
        retry, what = False, f"{what}, for the second time at step {root.step}"
    # An error that is not retried counts as recurring.
    kind = FailureKind.USER_ERROR if kind is FailureKind.EXCEPTION and not retry else kind
    # All ranks read the same sums, so the first one to report is not to blame.
    shared = kind is FailureKind.NUMERIC
    failure = Failure(
        kind=kind,
        reason=what if shared else f"rank {root.rank} on {root.node}{f' ({root.place})' if root.place else ''} {what}",
        rank=None if shared else root.rank,
        node=None if shared else root.node,
        step=root.step,
        exit_code=root.exit_code,
        signal=root.signal,
        exception=root.exception,
        # orch writes the message for a bad step itself, and the bad number in it varies.
        message=None if shared or root.exception is None else _short(root.message or ""),
    )
    skip = None if root.position is None else Skip(step=root.step or 0, position=root.position, reason=failure.reason)
    action = Action.RESTART if retry else Action.END
    return Decision(action=action, reason=failure.reason, failure=failure, mark=mark, skip=skip, outside=outside)


def is_outside(error: str) -> bool:
    """Return whether an error points to a failure of the network, a server or another process."""
    return has_meaning(error, Meaning.OUTSIDE)


def _meets_limit(end: RankEnd, error: str) -> bool:
    """Return whether the node could not start a thread or process, which proves nothing about the code."""
    return has_meaning(error, Meaning.NO_PROCESSES) and end.exception not in _CODE_ERRORS and not end.secondary


def find_root(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the bad exit that caused the others: the most certain one, then the earliest."""
    return min((end for end in ends if not end.good), key=lambda end: (secondary_order(end), end.at))


def secondary_order(end: RankEnd) -> int:
    """Return 0 if this exit is self-explanatory, 1 if another exit may have caused it, 2 if it reports that one did."""
    if end.secondary:
        return 2
    if end.signal is not None:
        # Communication libraries abort the process when a peer is gone.
        return 1 if end.signal == signal.SIGABRT and not _mismatch(end) else 0
    # It may have received data of a different collective from the rank that gloo aborts.
    if end.exception is not None and _mismatch(end):
        return 1
    return 0 if end.exception is not None or end.exit_code in _RESERVED else 1


def _classify(end: RankEnd) -> tuple[FailureKind, bool, str]:
    """Return the kind, whether to retry, and the description that follows "rank N on NODE"."""
    error = f"{end.exception}: {end.message}" if end.exception else ""
    if _mismatch(end):
        return FailureKind.DESYNC, False, f"ran a different collective than its peers: {_short(end.message or '')}"
    if end.out_of_memory:
        return FailureKind.OUT_OF_MEMORY, True, f"ran out of memory: {end.out_of_memory}; {_memory_hint(end)}"
    if end.signal == signal.SIGXFSZ:
        return FailureKind.STORAGE, False, "reached the file size limit (SIGXFSZ; ulimit -f)"
    if end.signal is not None:
        return FailureKind.RANK_KILLED, True, f"was killed by {signal_name(end.signal)}"
    if end.exit_code == ExitCode.NEVER_RETRY:
        return FailureKind.USER_ERROR, False, f"asked never to be retried (exit code 78){_after(error)}"
    if end.exit_code == ExitCode.NODE_SUSPECT:
        return FailureKind.NODE_SUSPECT, False, f"suspects its node (exit code 77){_after(error)}"
    if end.exception in _BAD_STEPS and end.position is not None:
        return FailureKind.NUMERIC, True, _short(end.message or "")
    if end.exception == NothingFits.__name__:
        way = "restore the earlier code and model sizes, or submit a new run"
        what = f"has a different model than its checkpoints: {_short(end.message or '')}; {way}"
        return FailureKind.USER_ERROR, False, what
    if end.exception == UnsavableState.__name__:
        return FailureKind.USER_ERROR, False, f"cannot save its state: {_short(end.message or '')}"
    if end.exception in _CHECKPOINTS:
        return FailureKind.STORAGE, False, f"could not use its checkpoints: {_short(error)}"
    if end.exit_code == ExitCode.STORAGE:
        why = error or (end.lines[-1] if end.lines else "")
        return FailureKind.STORAGE, False, f"could not use its storage (exit code 74){_after(why)}"
    if has_meaning(error, Meaning.MEMORY, Meaning.GPU_MEMORY) and not end.secondary:
        return FailureKind.OUT_OF_MEMORY, True, f"ran out of memory: {_short(error)}; {_memory_hint(end)}"
    if _meets_limit(end, error):
        return FailureKind.UNKNOWN, True, f"hit a limit of its node: {_short(error)}; {LIMITS}"
    if has_meaning(error, Meaning.STORAGE) and end.exception not in _CODE_ERRORS:
        return FailureKind.STORAGE, False, f"could not use its storage: {_short(error)}"
    if has_meaning(error, Meaning.VARIABLE) and not end.secondary:
        name = variable_named(error)
        way = f"`env.{name}=...` sets another value, `~env.{name}` removes it from the configuration"
        return FailureKind.INSTALLATION, False, f"cannot use {name} from its environment: {_short(error)}; {way}"
    if end.secondary:
        return FailureKind.UNKNOWN, True, f"lost the connection to a peer: {_short(error)}"
    if end.exit_code == ExitCode.RETRY:
        return FailureKind.UNKNOWN, True, f"asked to be restarted (exit code 75){_after(error)}"
    if has_meaning(error, Meaning.NO_RENDEZVOUS):
        return FailureKind.UNKNOWN, True, f"could not connect to its peers: {_short(error)}"
    if end.exception is not None:
        return FailureKind.EXCEPTION, True, f"raised {_short(error)}"
    if end.exit_code in GOOD:
        return FailureKind.EXCEPTION, True, f"exited {end.exit_code} without reporting completion"
    # The last line names a program that did not start or that a shell did not find.
    why = f": {_short(end.lines[-1])}" if end.exit_code in _NOT_STARTED and end.lines else ""
    return FailureKind.EXCEPTION, True, f"ended with exit code {end.exit_code}{why}"


def variable_named(error: str) -> str:
    """Return the environment variable behind an error from torch, gloo or NCCL; gloo and NCCL do not name it."""
    named = re.search(r"\b(TORCH|NCCL|GLOO)_[A-Z_]+\b", error)
    return named[0] if named else "GLOO_SOCKET_IFNAME" if "Unable to find" in error else "NCCL_SOCKET_IFNAME"


def _memory_hint(end: RankEnd) -> str:
    """Return how to reduce memory use; a command's settings are unknown."""
    if end.step is None:
        return _LESS_MEMORY
    return _LESS_GPU_MEMORY if has_meaning(f"{end.exception}: {end.message}", Meaning.GPU_MEMORY) else MORE_MEMORY


def _mismatch(end: RankEnd) -> bool:
    """Return whether an exit reports that ranks called different collectives, which no restart can fix."""
    return not end.secondary and has_meaning(end.message or "", Meaning.MISMATCH)


def _after(error: str) -> str:
    return f": {_short(error)}" if error else ""


def _short(error: str) -> str:
    return cut(" ".join(error.split()), 300)
