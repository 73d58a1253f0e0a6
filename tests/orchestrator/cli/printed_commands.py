"""Commands of orch in printed text: where they begin and end, and whether they can be typed."""

import re
import shlex
from collections.abc import Iterator

import click

from orchestrator.cli.main import orch, verbs

_QUOTED = re.compile(r"`(orch [^`]*)`")
_NAMES = {*verbs(), *(verb.partition(" ")[0] for verb in verbs())}
_BARE = re.compile(rf"(?<![\w`/.-])orch (?:{'|'.join(sorted(_NAMES))}|-h)\b(?:(?! {{2}}|\n).)*")
"""Not in backticks: up to the end of the line, or two spaces."""


def commands_in(text: str) -> list[list[str]]:
    found = [(match.start(), match[1]) for match in _QUOTED.finditer(text)]
    rest = _QUOTED.sub(lambda match: " " * len(match[0]), text)
    found += [(match.start(), match[0]) for match in _BARE.finditer(rest)]
    return [words for _, command in sorted(found) for words in _each(command)]


def _each(command: str) -> Iterator[list[str]]:
    for part in command.split("&&"):
        text = part.strip().rstrip(".,;:)?")
        try:
            words = shlex.split(text)
        except ValueError:  # an apostrophe: prose goes on where the command should have ended
            words = text.split()
        words = [word for word in words[1:] if word not in ("...", "&")]
        if words and words[0].islower():
            yield words


def is_name(words: list[str]) -> bool:
    return " ".join(words) in _NAMES


_PLAIN_ARGUMENTS = {"demo", "nan", "desync", "local", "slurm", "auto", "cron", "scrontab", "same", "all", "restore"}


def why_not_typed(words: list[str]) -> str:
    verb = 2 if " ".join(words[:2]) in _NAMES else 1
    prose = [word for word in words[verb:] if word.isalpha() and word.islower() and word not in _PLAIN_ARGUMENTS]
    if prose:
        return f"goes on with prose: {' '.join(prose)}; put the command in backticks"
    try:
        context = orch.make_context("orch", list(words))
        command: click.Command = orch
        while isinstance(command, click.Group) and (left := [*context._protected_args, *context.args]):
            name, found, rest = command.resolve_command(context, left)
            assert found is not None
            command = found
            context = command.make_context(name, rest, parent=context)
    except click.exceptions.Exit:
        return ""  # -h
    except click.ClickException as error:
        return error.format_message()
    return ""
