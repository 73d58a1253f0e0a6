"""Judges whether a user program fails because of itself, its checkpoint or the environment. Pure.
Only errors that the bytes of a file can cause count as loading errors, whatever else they mention. Errors from a GPU,
the network or missing permissions never count. Earlier output proves nothing: most programs print what they resume
from, whatever goes wrong afterwards. The program's steps are unknown, and most programs turn every error into exit code
1, including a lost peer. So two failures match if the exception, the time trained and the amount of output match. Only
failures that recur soon after the start, with nothing saved, are left for the user to fix.
"""

import errno
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from trainer.agent.ladder.rank_death import LIMITS, find_cause, find_root, is_outside
from trainer.agent.rank_processes.rank_exit import RANK_PREFIX, TRACEBACK
from trainer.protocol.command_progress import PROGRESS_SECONDS
from trainer.protocol.failures.decision import Action, CommandFailure, Decision
from trainer.protocol.failures.failure_patterns import VARYING, Meaning, has_meaning
from trainer.protocol.failures.outcome import FailureKind, select_kinds
from trainer.protocol.failures.rank_end import RankEnd

_FRAME = re.compile(r'^\s+File "')
_COMPLAINT = re.compile(r"(?i:error|fail|cannot|could not|unable|corrupt|invalid|truncated|unexpected)")
_CHAINED = re.compile(r"(During handling of the above|The above) exception")
_ERRNO = re.compile(r"\b(?:errno|os error)\W{1,3}(\d{1,5})", re.IGNORECASE)
_FILE_ERRNOS = frozenset({errno.ENOENT, errno.EINVAL, errno.EBADMSG, errno.EUCLEAN})
"""Errnos of a missing, truncated or damaged file. The content of a file causes no others."""
_URL = r"://"
_ABSOLUTE = r"(?<![\w./:~+@-])~?/(?![\w./+-]{0,300}\.(?:cc|cpp|cu|h|hpp|rs):\d)[\w.]"  # except lines of source code
_QUOTED = r"['\"][^'\"]{0,300}/[^'\"]{0,300}['\"]"
_OS_ERROR = r"\[Errno -?\d+\] [^:]{1,100}: ['\"]"
_PLACE = re.compile("|".join((_URL, _ABSOLUTE, _QUOTED, _OS_ERROR)))
"""A file or address in an error message."""
_ARGUMENT = re.compile(r"\(\s{0,20}(?:open\(|Path\()?[rb]?['\"][^'\"{}]{0,300}[/.][^'\"{}]{1,300}['\"]\s{0,20}[,)]")
"""A file that a line of code names as the first argument of a call."""


def is_loading_error(error: str, lines: Sequence[str], checkpoint: str, *, raised: bool, doubt: bool) -> bool:
    """Return whether the error shows that the program was loading `checkpoint`, or any file if the name is empty.
    `error` is the class and message of the exception, if one was `raised`, or else the last of `lines`. `doubt` means
    that the checkpoint is suspect for another reason, so an unexpected end of any file is sufficient evidence.
    """
    trace = _last_traceback(lines)
    text = "\n".join((*trace, error))
    if not raised and not _COMPLAINT.search(error):
        return False
    words = "\n".join((*_causes(lines), error))
    if any(int(number) not in _FILE_ERRNOS for number in _ERRNO.findall(words)) or has_meaning(
        text, Meaning.TRAINING_DATA
    ):
        return False
    parsed = has_meaning(words, Meaning.UNREADABLE, Meaning.CUT_OFF, Meaning.BROKEN)
    if _is_named(checkpoint, error):
        return parsed or has_meaning(words, Meaning.MISSING)
    # The error names another file or a server.
    if _PLACE.search(error):
        return False
    code = [line for line in trace if not _FRAME.match(line)]
    if any(_is_named(checkpoint, line) for line in code):
        return parsed
    if any(has_meaning(line, Meaning.LOADING) and _ARGUMENT.search(line) for line in code):
        return False
    by_itself = has_meaning(error, Meaning.UNREADABLE) or (doubt and has_meaning(error, Meaning.CUT_OFF))
    return by_itself or (parsed and has_meaning(text, Meaning.LOADING))


def _causes(lines: Sequence[str]) -> list[str]:
    """Return the messages of the exceptions that led to the last one: its causes, or exceptions being handled."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    chained = [at for at, line in enumerate(lines) if _CHAINED.match(line)]
    return [lines[at - 1] for at in chained if at]


def _last_traceback(lines: Sequence[str]) -> list[str]:
    """Return the frames of the last traceback, the first of which may have been cut off."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    starts = [at + 1 for at, line in enumerate(lines) if line.startswith(TRACEBACK)]
    starts = starts or [at for at, line in enumerate(lines) if _FRAME.match(line)][:1]
    return list(takewhile(lambda line: line[:1].isspace(), lines[starts[-1] :])) if starts else []


def _is_named(checkpoint: str, text: str) -> bool:
    """Return whether the text names the checkpoint. A plain number or word counts only as part of a path."""
    before = r"(?<=[/'\"])" if re.fullmatch(r"\d+|[A-Za-z]+", checkpoint) else r"(?<![\w-])"
    return bool(checkpoint) and bool(re.search(f"{before}{re.escape(checkpoint)}(?![\\w-])", text))


START_SECONDS = 300.0
"""Seconds that a program may need to start. If it runs longer, it is assumed to have trained."""

LONGEST_SECONDS = 3600.0
"""A program that ran longer than this has worked, so a repeated failure does not prove that it is at fault."""

REPEATS = 3
"""Consecutive matching failures after which another attempt is pointless."""

MOST_SET_ASIDE = 3
"""Maximum number of checkpoints set aside before the program trains again."""

_OWN_KINDS = select_kinds(lambda traits: traits.of_the_program)
"""Failures raised by the program itself."""

_TIME, _OUTPUT = 1.5, 1.25
_FEW_SECONDS, _FEW_BYTES = 20.0, 400
"""Times and amounts that differ by no more than these ratios or differences match."""

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""Signals caused by the program's own actions, including loading a truncated file."""


_NOT_SENT = "which orch did not send; a script that ends with `kill 0` (trap 'kill 0' EXIT) sends it to itself"
"""Addition to a death by SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The newest of the program's own checkpoints when this generation was started."""

    identity: str
    name: str
    damage: str = ""  # why it cannot be complete; empty: no sign of damage
    lacking: bool = False  # the only sign is a missing file that older ones have


@dataclass(frozen=True, kw_only=True)
class MovedCheckpoint:
    """A checkpoint that was set aside since the program last trained."""

    names: tuple[str, ...]  # of its entries
    path: str
    damage: str = ""  # empty: no sign of damage


@dataclass(frozen=True, kw_only=True)
class CommandPast:
    """Known facts about the program, apart from its ranks' exits."""

    failures: tuple[CommandFailure, ...] = ()  # consecutive failures of earlier generations, oldest first
    newest: NewestCheckpoint | None = None
    saved: bool = False  # it saved a checkpoint of a new step in this generation
    saved_after: float = 0.0  # seconds from the start to the newest complete checkpoint, whatever its step; 0 if none
    trained: bool = False  # it trained at some time before this generation
    older: str = ""  # name of an older checkpoint without a known sign of damage, or empty
    torn: NewestCheckpoint | None = None  # an incomplete older checkpoint, if the newest has no sign of damage
    cleared: bool = False  # an older checkpoint was set aside, and the newest is still the newest
    first: bool = False  # the newest is the only checkpoint, and no complete one is known to have existed
    aside: tuple[str, ...] = ()  # names of the checkpoints set aside since the program last trained
    doubtful: bool = False  # a checkpoint in `aside` has no sign of damage
    moved: tuple[MovedCheckpoint, ...] = ()  # those in `aside`, and those with proven damage
    unmovable: str = ""  # reason why no checkpoint may be moved away; empty: allowed
    unmatched: str = ""  # names in `checkpoints.path` if `checkpoints.pattern` matches none of them
    disk: str = ""  # why the run's folder was not writable after a rank had failed; empty if it was


@dataclass(frozen=True, kw_only=True)
class CommandJudgement:
    """Whether another attempt is pointless, and the reason to set the newest checkpoint aside, if any."""

    final: bool
    reason: str
    set_aside: str = ""
    tries: int = 0  # failures after loading one checkpoint that shows no damage


def has_advanced(past: CommandPast, seconds: float) -> bool:
    """Return whether this generation has made progress: saved a checkpoint or, if no step is known, run for long
    enough. It was started `seconds` ago. Steps that restart or alternate look the same as in a program that always
    starts at step 0.
    """
    return past.saved or (seconds if past.newest is None else past.saved_after) >= PROGRESS_SECONDS


def command_cause(ends: Sequence[RankEnd], past: CommandPast, seconds: float) -> Decision:
    """Return the cause among `ends` of a generation that was started `seconds` ago."""
    root = find_root(ends)
    cause = find_cause(ends, trained=True)
    raised = cause.known_failure.kind in _OWN_KINDS and cause.retry and root.signal is None
    failure = replace(cause.known_failure, step=None, lines=root.lines)
    early = _ended_early(ends, root)
    if early is not None:
        reason = f"rank {early.rank} on {early.node} ended with exit code 0 before the others: {failure.reason}"
        failure = replace(failure, rank=early.rank, node=early.node, reason=reason)
    limited = has_meaning(_error_text(root), Meaning.NO_PROCESSES)
    outside = limited or is_outside(_error_text(root))
    own = early is not None or (raised and not outside)
    if cause.known_failure.kind is FailureKind.EXCEPTION:  # most programs report every failure this way
        failure = replace(failure, kind=FailureKind.UNKNOWN)
    if limited and LIMITS not in failure.reason:
        failure = replace(failure, reason=f"{failure.reason}; {LIMITS}")
    if root.signal == signal.SIGTERM:
        failure = replace(failure, reason=f"{failure.reason}, {_NOT_SENT}")
    cause = replace(cause, failure=failure, mark="", outside=outside)
    # Its last output may have been lost for the same reason.
    if own and past.disk:
        failure = replace(failure, kind=FailureKind.STORAGE, reason=f"{failure.reason}: {past.disk}")
        return replace(cause, action=Action.END, failure=failure)
    if not own and root.signal not in _CRASHES:
        return cause
    mine = CommandFailure(
        mark=_mark(early or root), seconds=seconds, written=root.written, exception=root.exception, crashed=not own,
        saved=past.saved, trained=past.saved or seconds > START_SECONDS,
        loading=_loading(root, past, doubt=_is_torn(past) or past.torn is not None),
        began_from=past.newest.identity if past.newest else "",
    )  # fmt: skip
    judgement = judge([*past.failures, mine], past)
    reason = f"{failure.reason}{judgement.reason}"
    kind = failure.kind
    if judgement.final:
        reason = f"{reason}{likely_cause(root, past, [*past.failures, mine])}"
        kind = _final_kind(kind, root, past, [*past.failures, mine])
    return replace(
        cause, action=Action.END if judgement.final else Action.RESTART, own=mine, set_aside=judgement.set_aside,
        failure=replace(failure, kind=kind, reason=reason), tries=judgement.tries,
    )  # fmt: skip


def _ended_early(ends: Sequence[RankEnd], root: RankEnd) -> RankEnd | None:
    """Return the first rank that exited 0 while another still waited for a peer, as when it had fewer batches."""
    good = [end for end in ends if end.good and end.at <= root.at]
    waited = root.secondary or root.signal == signal.SIGABRT  # raised by communication libraries
    return min(good, key=lambda end: end.at) if good and waited else None


def judge(row: Sequence[CommandFailure], past: CommandPast) -> CommandJudgement:
    last, alike = row[-1], _count_repeats(row)
    # The cause may be what it loads at the start, so try an older checkpoint before blaming the program.
    if reason := _why_set_aside(row, past):
        return CommandJudgement(final=False, reason=f", {_span(last.seconds)} after its start", set_aside=reason)
    tries = _tries(row, past)
    # A program that has made progress works, so a repeated failure may have any cause.
    if last.saved:
        return CommandJudgement(final=False, reason=", after it had saved a checkpoint of its own")
    if last.seconds > LONGEST_SECONDS or last.crashed:
        return CommandJudgement(final=False, reason=f", {_span(last.seconds)} after its start")
    if alike < REPEATS:
        again = f", for the {_ordinal(alike)} time in a row" if alike > 1 else ""
        return CommandJudgement(final=False, reason=f"{again}, {_span(last.seconds)} after its start", tries=tries)
    # A bare exit code is too little evidence against a program that may have trained.
    if last.trained and last.exception is None:
        return CommandJudgement(final=False, reason=f", {_span(last.seconds)} after its start")
    longest = max(one.seconds for one in row[-alike:])
    return CommandJudgement(final=True, reason=f", {alike} times in a row within {_span(longest)} of its start")


def _count_repeats(row: Sequence[CommandFailure]) -> int:
    count = 1
    for one in reversed(row[:-1]):
        if not _failures_match(one, row[-1]):
            break
        count += 1
    return count


def _failures_match(one: CommandFailure, other: CommandFailure) -> bool:
    return (
        (one.mark, one.crashed, one.saved) == (other.mark, other.crashed, other.saved)
        and _near(one.seconds, other.seconds, _TIME, _FEW_SECONDS)
        and _near(one.written, other.written, _OUTPUT, _FEW_BYTES)
    )


def _near(one: float, other: float, ratio: float, few: float) -> bool:
    low, high = sorted((one, other))
    return high - low <= few or high <= low * ratio


def _tries(row: Sequence[CommandFailure], past: CommandPast) -> int:
    """Return how many failures came soon after a start from the newest checkpoint, or 0 if it shows damage.
    A second read of the same file may succeed, and an older checkpoint may load, so a single failure decides nothing.
    """
    if past.newest is None or past.newest.damage or row[-1].trained:
        return 0
    return sum(one.began_from == past.newest.identity and not one.trained for one in row)


def _why_set_aside(row: Sequence[CommandFailure], past: CommandPast) -> str:
    """Return why a checkpoint must not be loaded again, or "" if any of them may be.
    If set, `past.torn` is chosen: the program may not be loading the newest checkpoint, and the torn one is useless.
    """
    last, newest = row[-1], past.newest
    if newest is None or len(past.aside) >= MOST_SET_ASIDE:
        return ""
    # Ranks might continue from different steps, or the program might load a different checkpoint than expected.
    if past.unmovable:
        return ""
    if past.torn is not None:
        soon = [one for one in row if one.began_from == newest.identity and one.loading and not one.trained]
        if last not in soon or len(soon) < 2 or last.crashed:
            return ""
        why = f"the program failed {len(soon)} times soon after a start, and this checkpoint {past.torn.damage}"
        return f"{past.torn.name}, an older checkpoint, will be moved away before {newest.name} is blamed: {why}"
    # The last complete checkpoint is never given up, nor are several that all look damaged, since the sign may be
    # wrong. Moving a damaged first checkpoint away costs no progress.
    if not past.older and not (past.first and newest.damage):
        return ""
    if not newest.damage and (past.doubtful or last.crashed):
        return ""
    # Provably incomplete bytes are sufficient. Otherwise only failures to load a file count.
    by_bytes = bool(_is_torn(past) and past.older)
    # A large checkpoint takes a long time to load; if it is damaged, a late failure does not prove training.
    soon = [
        one for one in row
        if one.began_from == newest.identity
        and (one.loading or by_bytes)
        and (one.mark == last.mark or not past.cleared)
        and (not one.trained or (newest.damage and one.loading and not one.saved and one.seconds <= LONGEST_SECONDS))
    ]  # fmt: skip
    if last not in soon:
        return ""
    # A single failure may be an accident, but after another checkpoint was set aside, a sign of damage is sufficient.
    if len(soon) < 2 and not (newest.damage and past.aside):
        return ""
    why = f"it {newest.damage}" if newest.damage else f"the program failed {len(soon)} times soon after a start from it"
    then = f", so that {past.older} becomes the newest" if past.older else ""
    alone = "" if past.older else "; orch finds no complete older one"
    return f"{newest.name}, its newest checkpoint, will be moved away{then}: {why}{alone}"


def same_without(row: Sequence[CommandFailure]) -> bool:
    """Return whether the newest failure matches an earlier one that began from a different newest checkpoint."""
    last = row[-1] if row else None
    return last is not None and any(
        one.mark == last.mark and one.began_from and one.began_from != last.began_from for one in row
    )


def likely_cause(root: RankEnd, past: CommandPast, row: Sequence[CommandFailure]) -> str:
    """Return advice on what to check first, to append to the reason."""
    if (wanted := _find_wanted(root, past)) is not None:
        why = wanted.damage or "may be damaged"
        other = f"name {past.newest.name} there" if past.newest is not None else "delete that pointer to start again"
        return (
            f"; it asks for {wanted.names[0]}, which orch has moved to {wanted.path}, because it {why}. A file of the "
            f"program names it: {other}"
        )
    if past.newest is not None:
        torn = f", which {past.newest.damage}" if past.newest.damage else ""
        if past.cleared:
            gone = f"{past.aside[-1]} was moved away earlier"
            return f"; its newest checkpoint is {past.newest.name}{torn}, and {gone}"
        if past.aside:
            then = "made no difference" if same_without(row) else "is now the newest, and the program fails differently"
            return f"; its newest checkpoint was {past.aside[0]}, and {past.newest.name}{torn} {then}"
        if past.unmovable and _is_checkpoint_fault(root, past, row):
            return f"; its newest checkpoint is {past.newest.name}{torn}. orch moves no checkpoint, {past.unmovable}"
        # The advice helps only if the program failed while loading the checkpoint.
        advised = not past.older and _is_checkpoint_fault(root, past, row)
        alone = ", and orch finds no complete older one: repair it, or move it away to start again" if advised else ""
        return f"; its newest checkpoint is {past.newest.name}{torn}{alone}"
    if past.unmatched:
        return f"; checkpoints.pattern matches nothing in checkpoints.path, which contains {past.unmatched}"
    if not past.trained:
        return ""
    return (
        "; it had trained before, so the likely cause is what it loads now: its own newest checkpoint. "
        "With checkpoints.path=FOLDER orch moves an incomplete one away"
    )


def _final_kind(kind: FailureKind, root: RankEnd, past: CommandPast, row: Sequence[CommandFailure]) -> FailureKind:
    if _find_wanted(root, past) is not None or _is_checkpoint_fault(root, past, row):
        return FailureKind.STORAGE
    return kind if kind is FailureKind.OUT_OF_MEMORY else FailureKind.USER_ERROR


def _is_checkpoint_fault(root: RankEnd, past: CommandPast, row: Sequence[CommandFailure]) -> bool:
    """Return whether the loaded data, not the code, must be fixed."""
    if _is_torn(past) and past.older:
        return True
    # If two undamaged checkpoints cause the same error, and it is one of complete files, the code or a library changed.
    whole = past.newest is not None and not past.newest.damage and past.doubtful
    if whole and same_without(row) and has_meaning(_error_text(root), Meaning.MISFIT):
        return False
    return _loading(root, past, doubt=True) and (past.trained or past.newest is not None)


def _find_wanted(root: RankEnd, past: CommandPast) -> MovedCheckpoint | None:
    """Return a checkpoint that was set aside and that the error names: a pointer unknown to orch leads to it."""
    error = _error_text(root)
    if any(int(number) not in _FILE_ERRNOS for number in _ERRNO.findall(error)):
        return None
    return next((one for one in past.moved if any(_is_named(name, error) for name in one.names)), None)


def _is_torn(past: CommandPast) -> bool:
    """Return whether the newest checkpoint's bytes cannot be complete."""
    return past.newest is not None and bool(past.newest.damage) and not past.newest.lacking


def _loading(root: RankEnd, past: CommandPast, *, doubt: bool) -> bool:
    """Return whether the program failed while loading its newest checkpoint, or any file if that is unknown."""
    names = [one.name for one in (past.newest, past.torn) if one is not None] or [""]
    raised = root.exception is not None
    return any(is_loading_error(_error_text(root), root.lines, name, raised=raised, doubt=doubt) for name in names)


def _error_text(root: RankEnd) -> str:
    return f"{root.exception}: {root.message}" if root.exception else (root.lines[-1] if root.lines else "")


def _mark(root: RankEnd) -> str:
    end = f"signal {root.signal}" if root.signal is not None else f"exit code {root.exit_code}"
    return f"{end}: {VARYING.sub('#', _error_text(root))}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
