"""Shell scripts in a `command:`, read roughly; those that hide the failure of their program are refused. Pure."""

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

from orchestrator.errors import ConfigError

SHELL = re.compile(r"(?:.*/)?(?:bash|sh|dash|zsh|ksh)")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_ENDS = frozenset({";", "&&", "||", "&", "(", ")"})
_FILTERS = frozenset({"tee", "cat", "grep", "egrep", "sed", "awk", "ts", "tr", "cut", "head", "tail", "logger", "sort"})
"""Programs that end well whatever the program before them in a pipe did; nobody trains in them."""
_BOTH_STREAMS = re.compile(r"\d*>&\d")
_LAST_WORDS = frozenset({"echo", "printf", "date", "true", ":"})
"""Commands that always end well, so that a script whose last one they are does, too."""
_KEEPS_CODE = re.compile(r"\bset\s+-\w*e|\berrexit\b|\bexit\b|\breturn\b|\btrap\b|\bexec\b|&&|\|\||\$\?")
"""With these a script may well end with the code of its program."""


def refuse_lost_exit_code(command: Sequence[str], script: str = "") -> None:
    """Raise ConfigError where a program that fails ends with exit code 0; `script`: text of a shell script.

    orch takes exit code 0 for the end of the training.
    """
    text = inline_text(command) or script
    options = command[: command.index(text)] if text in command else command
    lines = [line for line in lines_of_words(text) if line and not line[0].startswith("#")]
    if not lines:
        return
    trains = [line for line in lines if any(map(_PYTHON.fullmatch, line))][-1:]
    hidden = next(filter(None, map(_filter_after_pipe, trains)), "")
    if hidden and "pipefail" not in f"{text} {' '.join(options)}":
        what = f"command: the exit code of a pipe is that of `{hidden}`: a program that fails would count as done"
        hint = "type `set -o pipefail;` before it in bash; orch keeps the output by itself: `orch logs RUN`"
        raise ConfigError(what, where="command", hint=hint)
    strict = any(re.fullmatch(r"-\w*e\w*", word) for word in options[1:])
    last = lines[-1]
    ends = last[max((at + 1 for at, word in enumerate(last) if word in (";", "&")), default=0) :] or last
    starts_more = len(lines) > 1 or len(ends) < len(last)
    if starts_more and ends[0] in _LAST_WORDS and not strict and not _KEEPS_CODE.search(text):
        what = f"command: the script ends with `{ends[0]}`, so that a program before it that fails would count as done"
        raise ConfigError(what, where="command", hint="type `set -e` at the beginning of the script")


def _filter_after_pipe(words: Sequence[str]) -> str:
    """Return the filter that ends the pipe of the last Python program in these words; empty without one."""
    at = max(place for place, word in enumerate(words) if _PYTHON.fullmatch(word))
    piped = ""
    for word, after in pairwise(words[at:]):
        if word in _ENDS:
            break
        if word in ("|", "|&"):
            piped = after.rpartition("/")[2]
    return piped if piped in _FILTERS else ""


def inline_text(command: Sequence[str]) -> str:
    """Return the text of `bash -c TEXT`; empty for any other command."""
    if not command or not SHELL.fullmatch(command[0]):
        return ""
    at = next((place for place, word in enumerate(command) if re.fullmatch(r"-\w*c", word)), 0)
    return command[at + 1] if 0 < at < len(command) - 1 else ""


def lines_of_words(text: str) -> Iterator[list[str]]:
    """Yield the words of each line of a shell text, separators among them; lines with an open quote are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(_BOTH_STREAMS.sub("", line), posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split = True
        try:
            yield list(lexer)
        except ValueError:
            continue
