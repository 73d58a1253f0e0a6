"""PURE: whether a program failed while it loaded its newest checkpoint, by the text of the error alone.

Only an error that the bytes of a file can cause counts, whatever else it names: a GPU, the network or a missing right
never does. What was printed before is no sign: most programs print what they resume from, whatever they fail of next.
"""

import errno
import re
from collections.abc import Sequence
from itertools import takewhile

from trainer.agent.ranks.last_output import RANK_PREFIX, TRACEBACK
from trainer.contract.failures.failure_patterns import Meaning, error_says

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
