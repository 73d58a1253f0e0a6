"""Commands of a script before its launch line: setup that the job runs once, variables, and what orch replaces."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from orchestrator.scheduler.job_environment import SECRET
from orchestrator.submission.from_sbatch.launch import RANK_VARIABLES, LaunchLine, Remark, plain_words
from orchestrator.submission.from_sbatch.shell_text import (
    Incomplete,
    ShellLine,
    Token,
    assignment,
    expand,
    names_set_to_default,
    pieces,
    references,
    simple_commands,
    tokenize,
    unescape,
    unquote,
)
from trainer.protocol.launchers import find_launcher

_PRINTS = frozenset(
    {
        "echo", "printf", "date", "hostname", "nvidia-smi", "rocm-smi", "clear", "env", "printenv", "which", "pwd",
        "squeue", "sinfo", "scontrol",
    }
)  # fmt: skip
_ENVIRONMENTS = frozenset(
    {
        "module", "ml", "source", ".", "conda", "mamba", "micromamba", "eval", "spack", "uenv", "pixi",
    }
)  # fmt: skip
"""Commands that may select another Python."""
LOGIN_SHELL = (
    ". /etc/profile",
    'for file in ~/.bash_profile ~/.bash_login ~/.profile; do if [ -r "$file" ]; then . "$file"; break; fi; done',
)
_PATHS = frozenset({"PATH", "PYTHONPATH"})
_SUBSHELL = Token("(", is_operator=True)
_STACK_PLACE = re.compile(r"[+-]")
"""Beginning of an option of `pushd`, or of a number that names an entry of its stack."""


@dataclass(kw_only=True)
class Setup:
    """Setup of a script's environment."""

    lines: list[str] = field(default_factory=list)
    env: dict[str, tuple[str, int, str]] = field(default_factory=dict)  # name -> value, line, text
    folders: list[str] = field(default_factory=list)  # folders to enter from the submit folder, in order
    stack: list[list[str]] = field(default_factory=list)  # folders before each `pushd`
    selects_python: bool = False
    left_out: list[Remark] = field(default_factory=list)
    unclear: list[Remark] = field(default_factory=list)


def script_values(lines: Iterable[ShellLine], before: int) -> dict[str, str]:
    """Return the variables that the script sets once, outside conditions and loops, to a value that is known now.

    A value is text as inside double quotes: references to unknown variables stay in it.
    """
    values: dict[str, str] = {}
    unknown: set[str] = set()
    for line in lines:
        if line.number >= before:
            break
        for name, raw in _assignments(line):
            value = None if line.is_nested or name in values else _known_value(raw, values)
            if value is None:
                unknown.add(name)
            else:
                values[name] = value
    return {name: value for name, value in values.items() if name not in unknown}


def _assignments(line: ShellLine) -> Iterator[tuple[str, str]]:
    words = line.words
    is_export = words[:1] in (["export"], ["declare"], ["readonly"])
    for word in words[is_export:]:
        if (found := assignment(word)) is not None and (is_export or line.is_nested or all(map(assignment, words))):
            yield found


def _known_value(raw: str, values: Mapping[str, str]) -> str | None:
    """Return the value of an assignment; None if bash must run a command or read a file name for it."""
    filled = expand(raw, values)
    runs = [piece for piece in _inner_pieces(filled) if piece.startswith(("$(", "`")) and not piece.startswith("$((")]
    if raw.startswith("(") or runs or any(re.match(r"\$\{\w+[^\w}]", piece) for piece in _inner_pieces(filled)):
        return None
    if "'" in filled and "$" in filled:
        return None
    found = unquote(filled)
    if found is not None:
        return found
    return unescape(filled[1:-1]) if filled[:1] == filled[-1:] == '"' else filled


def _inner_pieces(text: str) -> Iterator[str]:
    for piece in pieces(text):
        if piece[0] == '"' and len(piece) > 1:
            yield from pieces(piece[1:-1], quoted=True)
        else:
            yield piece


def read_setup(
    lines: Sequence[ShellLine], launch: LaunchLine, command: str, values: Mapping[str, str], numbers: Mapping[str, str],
    *, login_shell: bool,
) -> Setup:  # fmt: skip
    """Sort the lines before the launch line. `command` is the shell text of the program; `numbers` are Slurm's."""
    setup = Setup(selects_python=login_shell)
    kept = [_Kept(0, line, True) for line in LOGIN_SHELL] if login_shell else []
    for line in lines:
        if line.number < launch.line.number:
            kept += _sort_line(setup, line)
    for tokens in launch.before:
        text = " ".join(token.raw for token in tokens)
        kept += _sort_line(setup, ShellLine(number=launch.line.number, text=text, tokens=tuple(tokenize(text))))
    used = _drop_unused(setup, kept, command, values)
    texts = [item._replace(text=expand(item.text, numbers)) for item in used]
    _move_exports(setup, texts, command)
    if any(re.match(r"set\s", text) for text in setup.lines):
        setup.lines.append("set +eux +o pipefail")
    return setup


class _Kept(NamedTuple):
    """Line of the setup file. A fixed one is part of a condition, loop or function."""

    number: int
    text: str
    is_fixed: bool


def _sort_line(setup: Setup, line: ShellLine) -> list[_Kept]:
    """Return the line if the job must run it, after noting anything that it leaves out."""
    words = plain_words(line.words)
    first = words[0] if words else ""
    reason = ""
    if line.has_document:
        setup.unclear.append(Remark(line.number, line.text.split("\n")[0], "here-documents are not read"))
        return [_Kept(line.number, ":", True)] if line.is_nested else []
    if line.is_nested:
        setup.selects_python |= bool(set(words) & _ENVIRONMENTS)
        return [_Kept(line.number, line.text, True)]
    names = {name for name, _ in _assignments(line)}
    if _follow_folders(setup, line):
        commands = {tokens[0].raw for _, tokens in simple_commands(line.tokens)}
        setup.selects_python |= bool(commands & _ENVIRONMENTS)
        return [_Kept(line.number, line.text, False)]
    if names and names <= RANK_VARIABLES:
        reason = "orch sets it for every rank"
    elif first in _PRINTS or words[:2] in (["module", "list"], ["ml", "list"]):
        reason = "prints only"
    elif first in ("sbatch", "scancel", "exit", "wait"):
        reason = "orch submits the next job, and ends jobs, itself"
    elif first in ("srun", "trap"):
        why = (
            "another step of the job is not run" if first == "srun" else "orch sends SIGTERM to ranks, not to a script"
        )
        setup.unclear.append(Remark(line.number, line.text, why))
        return []
    if reason:
        setup.left_out.append(Remark(line.number, line.text, reason))
        return []
    setup.selects_python |= first in _ENVIRONMENTS or bool(names & _PATHS)
    return [_Kept(line.number, line.text, False)]


def _follow_folders(setup: Setup, line: ShellLine) -> bool:
    """Follow the commands of a line that change the folder outside a subshell; return whether there are any."""
    found, outside = False, takewhile(lambda token: token != _SUBSHELL, line.tokens)
    for operator, tokens in simple_commands([*outside]):
        raw = [token.raw for token in takewhile(lambda token: not token.redirects, tokens)]
        if raw[:1] not in (["cd"], ["pushd"], ["popd"]) or operator in ("||", "|"):
            continue
        found = True
        name, *arguments = raw
        if name == "cd" and len(arguments) == 1 and arguments[0] != "-":
            _enter(setup, arguments[0])
        elif name == "pushd" and len(arguments) == 1 and not _STACK_PLACE.match(arguments[0]):
            setup.stack.append([*setup.folders])
            _enter(setup, arguments[0])
        elif name == "popd" and not arguments and setup.stack:
            setup.folders = setup.stack.pop()
        else:
            why = "ranks do not follow this change of the folder; write `cd FOLDER`"
            setup.unclear.append(Remark(line.number, " ".join(raw), why))
    return found


def _enter(setup: Setup, folder: str) -> None:
    """Note a folder. The one from which the job was submitted is where ranks begin."""
    if "SLURM_SUBMIT_DIR" in folder and "/" not in folder and not setup.folders:
        return
    setup.folders.append(folder)


def _drop_unused(setup: Setup, kept: list[_Kept], command: str, values: Mapping[str, str]) -> list[_Kept]:
    """Drop assignments of variables that nothing uses any more, and exports of launch lines."""
    launches = {name for name, value in values.items() if find_launcher(_words_of_value(value)).name}
    needed, found = references(command), []
    for item in reversed(kept):
        tokens = tokenize(item.text)
        names = {pair[0] for token in tokens if (pair := assignment(token.raw))}
        is_plain = bool(names) and all(assignment(token.raw) for token in tokens)
        if not item.is_fixed and (is_plain or (names and names <= launches)) and not names & needed:
            setup.left_out.append(Remark(item.number, item.text, "used only by the launcher"))
            continue
        needed |= references(item.text)
        found.append(item)
    setup.left_out.sort()
    return found[::-1]


def _words_of_value(value: str) -> list[str]:
    try:
        return plain_words([token.raw for token in tokenize(value)]) or [""]
    except Incomplete:
        return [""]


def _move_exports(setup: Setup, texts: list[_Kept], command: str) -> None:
    """Move exports of plain values to `env`, unless the script itself uses them, and export what the command uses."""
    all_names = [references(item.text) for item in texts]
    exported: set[str] = set()
    plain: set[str] = set()
    for at, (number, text, is_fixed) in enumerate(texts):
        tokens = tokenize(text)
        pairs = [pair for token in tokens if (pair := assignment(token.raw))]
        is_export = tokens[0].raw == "export" and len(pairs) == len(tokens) - 1 and bool(pairs)
        used = set().union(*all_names[:at], *all_names[at + 1 :], references(command))
        values = {name: unquote(raw) for name, raw in pairs}
        movable = (
            not is_fixed and is_export and not set(values) & (used | _PATHS) and not any(map(SECRET.search, values))
        )
        if movable and all(value is not None and value.isprintable() for value in values.values()):
            setup.env |= {name: (str(value), number, text) for name, value in values.items()}
            continue
        (exported if tokens[0].raw == "export" else plain).update(values)
        plain |= names_set_to_default(text)
        setup.lines.append(text)
    if missing := sorted((plain - exported) & references(command)):
        setup.lines.append(f"export {' '.join(missing)}")
