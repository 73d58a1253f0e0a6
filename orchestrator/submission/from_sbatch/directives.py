"""`#SBATCH` lines of a script."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.errors import ConfigError
from orchestrator.submission.from_sbatch.shell_text import Incomplete, tokenize, unquote

LONG_NAMES = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus",
    "H": "hold", "I": "immediate", "J": "job-name", "K": "kill-on-bad-exit", "L": "licenses", "M": "clusters",
    "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec", "W": "wait", "a": "array", "b": "begin",
    "c": "cpus-per-task", "d": "dependency", "e": "error", "h": "help", "i": "input", "k": "no-kill", "l": "label",
    "m": "distribution", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "s": "oversubscribe",
    "t": "time", "u": "unbuffered", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""Long names of the short options of sbatch and srun."""
_NO_VALUE = frozenset(
    {
        "contiguous", "hold", "ignore-pbs", "label", "no-requeue", "overcommit", "overlap", "parsable", "pty", "quiet",
        "reboot", "requeue", "spread-job", "stepmgr", "test-only", "unbuffered", "use-min-nodes", "verbose", "wait",
        "exact", "no-container-mount-home", "container-mount-home", "container-writable", "container-readonly",
        "container-remap-root", "no-container-remap-root", "no-container-entrypoint", "container-entrypoint",
        "multi-prog", "preserve-env",
    }
)  # fmt: skip
_OPTIONAL_VALUE = frozenset(
    {
        "exclusive", "get-user-env", "kill-on-bad-exit", "nice", "no-kill", "oversubscribe", "propagate", "resv-ports",
        "immediate",
    }
)  # fmt: skip
"""Options whose value, if any, follows an equals sign."""
_LINE = re.compile(r"#SBATCH(?=\s)(.*)")
_COMPONENT = re.compile(r"#SBATCH\s+(?:hetjob|packjob)\s*")


@dataclass(frozen=True, kw_only=True)
class Option:
    """Option of sbatch or srun under its long name; `value` is None if it has none."""

    name: str
    value: str | None
    line: int
    text: str  # as written


def plain_text(raw: str) -> str:
    """Return a word without its quotes; a word with expansions loses only quotes around it."""
    text = unquote(raw)
    return raw.strip('"') if text is None else text


def read_options(words: list[str], line: int) -> tuple[list[Option], list[str]]:
    """Return the options at the beginning of a command's words, and the words that follow."""
    found, rest = [], list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, given = word[2:].partition("=")
            name = name.replace("_", "-")
            if not equals and name not in _NO_VALUE | _OPTIONAL_VALUE and rest:
                given = rest.pop(0)
                word = f"{word} {given}"
        else:
            name, given = LONG_NAMES.get(word[1], word[1]), word[2:].removeprefix("=")
            if name in _NO_VALUE | _OPTIONAL_VALUE and given and given.isalpha() and name != "kill-on-bad-exit":
                rest.insert(0, f"-{given}")  # several flags in one word
                word, given = word[:2], ""
            elif not given and name not in _NO_VALUE | _OPTIONAL_VALUE and rest:
                given = rest.pop(0)
                word = f"{word} {given}"
        found.append(Option(name=name, value=plain_text(given) if given else None, line=line, text=word))
    return found, rest[1:] if rest[:1] == ["--"] else rest


def refuse_components(text: str, where: str) -> None:
    """Raise ConfigError for a heterogeneous job: its components have directives of their own."""
    for number, line in enumerate(text.splitlines(), 1):
        if _COMPONENT.fullmatch(line):
            what = f"`{line.strip()}` begins another component of a heterogeneous job, but a run has nodes of one kind"
            hint = "keep the directives of one component in a copy of the script"
            raise ConfigError(what, where=f"{where}:{number}", hint=hint)


def read_directives(text: str) -> Iterator[Option]:
    """Yield the options of all `#SBATCH` lines. An option named "" is a line that Slurm ignores or cannot read."""
    is_over = False
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            is_over = is_over or bool(line.strip() and not line.lstrip().startswith("#"))
            continue
        words = _words(match[1])
        options, rest = read_options(words, number) if words is not None else ([], [line])
        if is_over or rest:
            yield Option(name="", value=_BEHIND if is_over else "is not an option", line=number, text=line)
        else:
            yield from options


_BEHIND = "Slurm ignores directives after the first command"


def _words(text: str) -> list[str] | None:
    try:
        return [token.raw for token in tokenize(text)]
    except Incomplete:
        return None
