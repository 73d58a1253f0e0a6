"""Judgement of a user's program that fails: its own fault, its checkpoint, or the environment. Pure.

Only an error that the bytes of a file can cause counts, whatever else it names: a GPU, the network or a missing right
never does. What was printed before is no sign: most programs print what they resume from, whatever they fail of next.

No step of such a program is known, and most programs turn every error into exit code 1, that of a lost peer included.
So two failures are alike when what was raised, the time trained and the amount written are alike; and only those that
come again and again soon after the start, with nothing saved, are the user's to fix.
"""

import errno
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from trainer.agent.ranks.last_output import RANK_PREFIX, TRACEBACK
from trainer.agent.watch.root_cause import (
    LIMITS,
    VARYING,
    Cause,
    CommandFailure,
    RankEnd,
    find_cause,
    is_outside,
    root_of,
)
from trainer.contract.failures.failure_patterns import Meaning, error_says
from trainer.contract.failures.outcome import FailureKind, kinds_with
from trainer.contract.user_command.command_progress import PROGRESS_SECONDS

_FRAME = re.compile(r'^\s+File "')
_COMPLAINT = re.compile(r"(?i:error|fail|cannot|could not|unable|corrupt|invalid|truncated|unexpected)")
_CHAINED = re.compile(r"(During handling of the above|The above) exception")
_ERRNO = re.compile(r"\b(?:errno|os error)\W{1,3}(\d{1,5})", re.IGNORECASE)
_OF_BYTES = frozenset({errno.ENOENT, errno.EINVAL, errno.EBADMSG, errno.EUCLEAN})
"""What the system answers for a file that is missing, cut off or damaged; the bytes of a file cause no other errno."""
_URL = r"://"
_ABSOLUTE = r"(?<![\w./:~+@-])~?/(?![\w./+-]{0,300}\.(?:cc|cpp|cu|h|hpp|rs):\d)[\w.]"  # but for lines of source code
_QUOTED = r"['\"][^'\"]{0,300}/[^'\"]{0,300}['\"]"
_OF_THE_SYSTEM = r"\[Errno -?\d+\] [^:]{1,100}: ['\"]"
_PLACE = re.compile("|".join((_URL, _ABSOLUTE, _QUOTED, _OF_THE_SYSTEM)))
"""A file or an address in the words of an error."""
_ARGUMENT = re.compile(r"\(\s{0,20}(?:open\(|Path\()?[rb]?['\"][^'\"{}]{0,300}[/.][^'\"{}]{1,300}['\"]\s{0,20}[,)]")
"""A file that a line of code names as the first argument of a call."""


def is_loading_error(said: str, lines: Sequence[str], checkpoint: str, *, raised: bool, doubt: bool) -> bool:
    """Whether the error shows that the program was loading `checkpoint`; with an empty name, anything of the kind.

    `said`: the class and words of the exception, if one was `raised`, else the last line; `lines`: the last ones;
    `doubt`: there is another reason to suspect the checkpoint, so that the end of whatever it read is enough.
    """
    trace = _last_traceback(lines)
    text = "\n".join((*trace, said))
    if not raised and not _COMPLAINT.search(said):
        return False
    words = "\n".join((*_causes(lines), said))
    if any(int(number) not in _OF_BYTES for number in _ERRNO.findall(words)) or error_says(text, Meaning.TRAINING_DATA):
        return False
    parsed = error_says(words, Meaning.UNREADABLE, Meaning.CUT_OFF, Meaning.BROKEN)
    if _is_named(checkpoint, said):
        return parsed or error_says(words, Meaning.MISSING)
    # The error names another file or a server.
    if _PLACE.search(said):
        return False
    code = [line for line in trace if not _FRAME.match(line)]
    if any(_is_named(checkpoint, line) for line in code):
        return parsed
    if any(error_says(line, Meaning.LOADING) and _ARGUMENT.search(line) for line in code):
        return False
    by_itself = error_says(said, Meaning.UNREADABLE) or (doubt and error_says(said, Meaning.CUT_OFF))
    return by_itself or (parsed and error_says(text, Meaning.LOADING))


def _causes(lines: Sequence[str]) -> list[str]:
    """Return the words of the exceptions that the last one was raised from, or while they were handled."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    chained = [at for at, line in enumerate(lines) if _CHAINED.match(line)]
    return [lines[at - 1] for at in chained if at]


def _last_traceback(lines: Sequence[str]) -> list[str]:
    """Return the frames of the last traceback; the first ones may have been cut off."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    starts = [at + 1 for at, line in enumerate(lines) if line.startswith(TRACEBACK)]
    starts = starts or [at for at, line in enumerate(lines) if _FRAME.match(line)][:1]
    return list(takewhile(lambda line: line[:1].isspace(), lines[starts[-1] :])) if starts else []


def _is_named(checkpoint: str, text: str) -> bool:
    """Whether the text names it: a name that is a plain number or word only as a part of a path."""
    before = r"(?<=[/'\"])" if re.fullmatch(r"\d+|[A-Za-z]+", checkpoint) else r"(?<![\w-])"
    return bool(checkpoint) and bool(re.search(f"{before}{re.escape(checkpoint)}(?![\\w-])", text))


START_SECONDS = 300.0
"""What a program may need to start: one that ran for longer has trained, as far as anybody can tell."""

LONGEST_SECONDS = 3600.0
"""A program that ran for longer than this worked: the same end again is no proof of a fault of its own."""

REPEATS = 3
"""Failures alike in a row after which another try is pointless."""

MOST_SET_ASIDE = 3
"""Checkpoints that may be set aside before the program trains on."""

_OWN_KINDS = kinds_with(lambda traits: traits.of_the_program)
"""What a program raises by itself."""

_TIME, _OUTPUT = 1.5, 1.25
_FEW_SECONDS, _FEW_BYTES = 20.0, 400
"""Times and amounts within these ratios, or so near, are alike."""

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""Signals that a program gets for what it does itself, loading a file that was cut off included."""
_NAMED = re.compile(r"(?<![\w./~=+-])[\w./~=+-]*(?:checkpoint|ckpt)[\w.=+-]{0,255}\d[\w./=+-]*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The newest of the program's own checkpoints when this generation was started."""

    identity: str
    name: str
    damage: str = ""  # why it cannot be whole; empty: no sign of it
    lacking: bool = False  # that sign is only a file that older ones have


@dataclass(frozen=True, kw_only=True)
class CommandPast:
    """What is known of the program besides the ends of its ranks."""

    failures: tuple[CommandFailure, ...] = ()  # in a row, oldest first, of the generations before this one
    newest: NewestCheckpoint | None = None
    saved: bool = False  # a checkpoint since this generation began, of a step that is new
    saved_after: float = 0.0  # seconds from then to the newest whole checkpoint, whatever its step; 0: none
    trained: bool = False  # at some time before this generation
    older: str = ""  # name of an older checkpoint without a known sign of damage, or empty
    torn: NewestCheckpoint | None = None  # an older one that cannot be whole, where the newest has no sign of damage
    cleared: bool = False  # such a one was set aside, and the newest has stayed the newest
    first: bool = False  # no other one is there, and no whole one ever was, as far as is known
    aside: tuple[str, ...] = ()  # names of the checkpoints set aside since the program last trained
    doubtful: bool = False  # one of them without a sign of damage
    unmovable: str = ""  # why no checkpoint may be moved away; empty: one may
    unmatched: str = ""  # names in `checkpoints.path`, of which `checkpoints.pattern` matches none
    disk: str = ""  # why nothing could be written into the run's folder when a rank had failed; empty: it could


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Whether another try is pointless, with the reason, and why to set the newest checkpoint aside, if it must be."""

    final: bool
    reason: str
    set_aside: str = ""
    tries: int = 0  # failures from a checkpoint that is tried again, without a sign of damage


def has_advanced(past: CommandPast, seconds: float) -> bool:
    """Whether this generation, started `seconds` ago, made progress: a checkpoint, or time if no step is known.

    Steps that begin anew or take turns look the same as those of a program that begins at step 0 at every start.
    """
    return past.saved or (seconds if past.newest is None else past.saved_after) >= PROGRESS_SECONDS


def command_cause(ends: Sequence[RankEnd], past: CommandPast, seconds: float) -> Cause:
    """The cause among `ends`, `seconds` after this generation was started."""
    root = root_of(ends)
    cause = find_cause(ends, trained=True)
    raised = cause.failure.kind in _OWN_KINDS and cause.retry and root.signal is None
    failure = replace(cause.failure, step=None, lines=root.lines)
    early = _ended_early(ends, root)
    if early is not None:
        reason = f"rank {early.rank} on {early.node} ended with exit code 0 before the others: {failure.reason}"
        failure = replace(failure, rank=early.rank, node=early.node, reason=reason)
    limited = error_says(_said(root), Meaning.NO_PROCESSES)
    outside = limited or is_outside(_said(root))
    own = early is not None or (raised and not outside)
    if cause.failure.kind is FailureKind.EXCEPTION:  # most programs turn every error into one
        failure = replace(failure, kind=FailureKind.UNKNOWN)
    if limited and LIMITS not in failure.reason:
        failure = replace(failure, reason=f"{failure.reason}; {LIMITS}")
    cause = replace(cause, failure=failure, mark="", outside=outside)
    # What it wrote of its end may be lost for the same reason.
    if own and past.disk:
        failure = replace(failure, kind=FailureKind.STORAGE, reason=f"{failure.reason}: {past.disk}")
        return replace(cause, failure=failure, retry=False)
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
        cause, failure=replace(failure, kind=kind, reason=reason), retry=not judgement.final, own=mine,
        set_aside=judgement.set_aside, tries=judgement.tries,
    )  # fmt: skip


def _ended_early(ends: Sequence[RankEnd], root: RankEnd) -> RankEnd | None:
    """Return the first rank that ended well while another still waited for a peer, as one with fewer batches does."""
    good = [end for end in ends if end.good and end.at <= root.at]
    waited = root.secondary or root.signal == signal.SIGABRT  # which communication libraries raise
    return min(good, key=lambda end: end.at) if good and waited else None


def judge(row: Sequence[CommandFailure], past: CommandPast) -> Judgement:
    """What to make of the newest of these failures in a row."""
    last, alike = row[-1], _alike_in_a_row(row)
    # It may be what it loads when it starts: an older checkpoint is tried before anybody is blamed.
    if reason := _why_set_aside(row, past):
        return Judgement(final=False, reason=f", {_span(last.seconds)} after its start", set_aside=reason)
    tries = _tries(row, past)
    # A program that has got on works: the same end may have come from anywhere.
    if last.saved:
        return Judgement(final=False, reason=", after it had saved a checkpoint of its own")
    if last.seconds > LONGEST_SECONDS or last.crashed:
        return Judgement(final=False, reason=f", {_span(last.seconds)} after its start")
    if alike < REPEATS:
        again = f", for the {_ordinal(alike)} time in a row" if alike > 1 else ""
        return Judgement(final=False, reason=f"{again}, {_span(last.seconds)} after its start", tries=tries)
    # A bare exit code says too little of a program that may have trained.
    if last.trained and last.exception is None:
        return Judgement(final=False, reason=f", {_span(last.seconds)} after its start")
    longest = max(one.seconds for one in row[-alike:])
    return Judgement(final=True, reason=f", {alike} times in a row within {_span(longest)} of its start")


def _alike_in_a_row(row: Sequence[CommandFailure]) -> int:
    count = 1
    for one in reversed(row[:-1]):
        if not _alike(one, row[-1]):
            break
        count += 1
    return count


def _alike(one: CommandFailure, other: CommandFailure) -> bool:
    return (
        (one.mark, one.crashed, one.saved) == (other.mark, other.crashed, other.saved)
        and _near(one.seconds, other.seconds, _TIME, _FEW_SECONDS)
        and _near(one.written, other.written, _OUTPUT, _FEW_BYTES)
    )


def _near(one: float, other: float, ratio: float, few: float) -> bool:
    low, high = sorted((one, other))
    return high - low <= few or high <= low * ratio


def _tries(row: Sequence[CommandFailure], past: CommandPast) -> int:
    """Count the failures soon after a start from the newest checkpoint; 0 if that has a sign of damage.

    A second read of the same file may succeed, and an older checkpoint may load, so one failure decides nothing.
    """
    if past.newest is None or past.newest.damage or row[-1].trained:
        return 0
    return sum(one.began_from == past.newest.identity and not one.trained for one in row)


def _why_set_aside(row: Sequence[CommandFailure], past: CommandPast) -> str:
    """Return why a checkpoint must not be loaded again; empty if all may be.

    It is `past.torn` where there is one: no program is sure to load the newest, and that one is of no use.
    """
    last, newest = row[-1], past.newest
    if newest is None or len(past.aside) >= MOST_SET_ASIDE:
        return ""
    # Ranks might go on from different steps, or the program might load another one than orch expects.
    if past.unmovable:
        return ""
    if past.torn is not None:
        soon = [one for one in row if one.began_from == newest.identity and one.loading and not one.trained]
        if last not in soon or len(soon) < 2 or last.crashed:
            return ""
        why = f"the program failed {len(soon)} times soon after a start, and this one {past.torn.damage}"
        return f"{past.torn.name}, an older checkpoint, will be moved away before {newest.name} is doubted: {why}"
    # The last whole checkpoint is never given up, nor are several that all look damaged: the sign may be wrong.
    # A damaged first one costs no progress.
    if not past.older and not (past.first and newest.damage):
        return ""
    if not newest.damage and (past.doubtful or last.crashed):
        return ""
    # Bytes that cannot be whole speak for themselves. Otherwise only failures to load something count.
    by_bytes = bool(_is_torn(past) and past.older)
    # A large one takes long to load: where it is damaged, failing while it is loaded is no sign of having trained.
    soon = [
        one for one in row
        if one.began_from == newest.identity
        and (one.loading or by_bytes)
        and (one.mark == last.mark or not past.cleared)
        and (not one.trained or (newest.damage and one.loading and not one.saved and one.seconds <= LONGEST_SECONDS))
    ]  # fmt: skip
    if last not in soon:
        return ""
    # Once is an accident; but where the one before it was torn, a sign of damage is enough.
    if len(soon) < 2 and not (newest.damage and past.aside):
        return ""
    why = f"it {newest.damage}" if newest.damage else f"the program failed {len(soon)} times soon after a start from it"
    then = f", so that {past.older} becomes the newest" if past.older else ""
    alone = "" if past.older else "; orch sees no whole older one"
    return f"{newest.name}, its newest checkpoint, will be moved away{then}: {why}{alone}"


def same_without(row: Sequence[CommandFailure]) -> bool:
    """Whether the newest failure came before in the same way, while another checkpoint was the newest."""
    last = row[-1] if row else None
    return last is not None and any(
        one.mark == last.mark and one.began_from and one.began_from != last.began_from for one in row
    )


def likely_cause(root: RankEnd, past: CommandPast, row: Sequence[CommandFailure]) -> str:
    """Words about what to look at first, to follow the reason."""
    if past.newest is not None:
        torn = f", which {past.newest.damage}" if past.newest.damage else ""
        if past.cleared:
            gone = f"{past.aside[-1]} was moved away before"
            return f"; its newest checkpoint is {past.newest.name}{torn}, and {gone}"
        if past.aside:
            then = (
                "made no difference" if same_without(row) else "is the newest now, from which it fails in another way"
            )
            return f"; its newest checkpoint was {past.aside[0]}, and {past.newest.name}{torn} {then}"
        if past.unmovable and _of_its_checkpoint(root, past, row):
            return f"; its newest checkpoint is {past.newest.name}{torn}. orch moves none, {past.unmovable}"
        # Only what failed while it loaded it is helped by that.
        advised = not past.older and _of_its_checkpoint(root, past, row)
        alone = ", and orch sees no whole older one: repair it, or move it away to begin anew" if advised else ""
        return f"; its newest checkpoint is {past.newest.name}{torn}{alone}"
    if past.unmatched:
        return f"; checkpoints.pattern matches nothing in checkpoints.path, where there are {past.unmatched}"
    if not past.trained:
        return ""
    named = [found for line in root.lines for found in _NAMED.findall(line)]
    which = f" ({named[-1]})" if named else ""
    return (
        f"; it had trained before, so the likely cause is what it loads now: its own newest checkpoint{which}. "
        "With checkpoints.path=FOLDER orch moves a torn one away"
    )


def _final_kind(kind: FailureKind, root: RankEnd, past: CommandPast, row: Sequence[CommandFailure]) -> FailureKind:
    if _of_its_checkpoint(root, past, row):
        return FailureKind.STORAGE
    return kind if kind is FailureKind.OUT_OF_MEMORY else FailureKind.USER_ERROR


def _of_its_checkpoint(root: RankEnd, past: CommandPast, row: Sequence[CommandFailure]) -> bool:
    """Whether not the code but what it loads has to be fixed."""
    if _is_torn(past) and past.older:
        return True
    # Two without a sign of damage that fail alike, with an error of whole files: the code, or a library, has changed.
    whole = past.newest is not None and not past.newest.damage and past.doubtful
    if whole and same_without(row) and error_says(_said(root), Meaning.MISFIT):
        return False
    return _loading(root, past, doubt=True) and (past.trained or past.newest is not None)


def _is_torn(past: CommandPast) -> bool:
    """Whether the bytes of the newest checkpoint cannot be whole."""
    return past.newest is not None and bool(past.newest.damage) and not past.newest.lacking


def _loading(root: RankEnd, past: CommandPast, *, doubt: bool) -> bool:
    """Whether it failed while it loaded its newest checkpoint, or anything where that is not known."""
    names = [one.name for one in (past.newest, past.torn) if one is not None] or [""]
    raised = root.exception is not None
    return any(is_loading_error(_said(root), root.lines, name, raised=raised, doubt=doubt) for name in names)


def _said(root: RankEnd) -> str:
    return f"{root.exception}: {root.message}" if root.exception else (root.lines[-1] if root.lines else "")


def _mark(root: RankEnd) -> str:
    end = f"signal {root.signal}" if root.signal is not None else f"exit code {root.exit_code}"
    return f"{end}: {VARYING.sub('#', _said(root))}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
