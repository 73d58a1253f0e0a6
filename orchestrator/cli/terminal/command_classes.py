"""Command classes: global options at any place, lazy groups, and suggestions for unknown verbs and options."""

import importlib
import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from orchestrator.cli.terminal.argument_types import COMPLETED_TEXT
from orchestrator.cli.terminal.render import Screen


def what_to_type(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """Return a hint with the option or configuration key that was probably meant; empty if none is close."""
    if (whole := _find_unquoted_list(words)) is not None:
        return f"the shell broke it at its blanks; put it in quotes: {shlex.quote(whole)}"
    if error.ctx is None or not any("KEY=VALUE" in str(item.metavar) for item in error.ctx.command.params):
        return ""
    from orchestrator.config import keys  # only for a mistake

    given, value = error.option_name, _value(error.option_name, words)
    key = keys.meant(given.lstrip("-").replace("-", "_"))
    return f"a key is typed without dashes: {key}={value or 'VALUE'}" if key else ""


def _find_unquoted_list(words: Sequence[str]) -> str | None:
    """Return a `KEY=[A, B]` that the shell split at its blanks, joined again; None without one."""
    for begin, word in enumerate(words):
        if re.match(r"[\w.]+=\[[^\]]*$", word):
            for end in range(begin + 1, len(words)):
                if words[end].endswith("]"):
                    return " ".join(words[begin : end + 1])
    return None


def _value(option: str, words: Sequence[str]) -> str:
    """Return the value typed after an option or joined to it."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if word == option:
            return "" if following.startswith("-") or "=" in following else following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if len(option) == 2 and word.startswith(option) and not word.startswith("--"):
            return word[2:]
    return ""


def _store(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value:
            setattr(context.ensure_object(Screen), name, value)

    return callback


def _show_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:  # also parsed for shell completion
        from importlib.metadata import version  # not needed by any verb

        context.ensure_object(Screen).say(f"orch {version('orch')}")
        context.exit()


def _flag(words: tuple[str, ...], name: str, text: str, **more: Any) -> click.Option:
    return click.Option(
        words, is_flag=True, expose_value=False, is_eager=True, callback=_store(name), help=text, **more
    )


def global_options() -> list[click.Option]:
    """Return the options that every verb takes, before or after its name."""
    return [
        _flag(("--json",), "json", "Print one JSON object on stdout, for programs."),
        _flag(("-q", "--quiet"), "quiet", "Print only the answer, no notes on stderr."),
        _flag(("-v", "--verbose"), "verbose", "Print more."),
        _flag(("--no-color",), "no_color", "Use no colours (as with NO_COLOR in the environment)."),
        _flag(("--no-progress",), "no_progress", "Show no progress bars."),
        _flag(("--utc",), "utc", "Print times in UTC instead of local time."),
        _flag(("--debug",), "debug", "Show the traceback of an error."),
        click.Option(
            ("--version",), is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
            help="Print the version.",
        ),
    ]  # fmt: skip


_HELP = {"help_option_names": ["-h", "--help"]}


class Verb(click.Command):
    """A command with the global options. `json_data` is the shape of its JSON answer, for docs/cli.md."""

    def __init__(self, *args: Any, json_data: str = "", **more: Any) -> None:
        more.setdefault("context_settings", _HELP)
        super().__init__(*args, **more)
        self.json_data = json_data
        for parameter in self.params:
            if parameter.type is click.STRING:
                parameter.type = COMPLETED_TEXT
        self.params += global_options()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, but refuse a long option typed with one dash."""
        long = {name for parameter in self.params for name in parameter.opts if name.startswith("--")}
        for word in itertools.takewhile(lambda word: word != "--", args):
            if word.startswith("-") and not word.startswith("--") and f"-{word}".partition("=")[0] in long:
                raise click.NoSuchOption(word, possibilities=[f"-{word}"], ctx=ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verb's own options first, and the global ones in a separate section."""
        hidden = {option.name for option in global_options()} | {"help"}
        options = [item for item in self.get_params(ctx) if isinstance(item, click.Option)]
        own = [item.get_help_record(ctx) for item in options if item.name not in hidden]
        rest = [item.get_help_record(ctx) for item in options if item.name in hidden]
        for title, records in (("Options", own), ("Global options", rest)):
            rows = [record for record in records if record is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Noun(click.Group):
    """A group of verbs for one kind of object (`orch ckpt ls`); `of_a_run` is the verb to suggest for a run's name."""

    command_class = Verb

    def __init__(self, *args: Any, of_a_run: str = "", **more: Any) -> None:
        more.setdefault("context_settings", _HELP)
        super().__init__(*args, **more)
        self.params += global_options()
        self.of_a_run = of_a_run

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Resolve as click does, with the closest valid name in the error."""
        word = args[0]
        if self.get_command(ctx, word) is None and not word.startswith("-"):
            raise self._no_such(word, args[1:], ctx)
        return super().resolve_command(ctx, args)

    def _no_such(self, word: str, rest: Sequence[str], ctx: click.Context) -> "NoSuchCommand":
        """Return the error for an unknown verb, with a similar verb, or for a run's name the verb that takes a run."""
        from orchestrator.near_words import nearest  # only for a mistake

        path, said = ctx.command_path, f"no such command `{word}`"
        if word == "help":
            return NoSuchCommand(said, ctx, shlex.join([*path.split(), *rest[:2], "-h"]))
        if path == "orch ckpt" and word in _DELETE:
            return NoSuchCommand(said, ctx, DELETED_BY_ORCH)
        if elsewhere := self._elsewhere(word, ctx):
            return NoSuchCommand(said, ctx, shlex.join([*elsewhere.split(), *rest]))
        if near := nearest(word.lower(), self.list_commands(ctx), 0.7):
            return NoSuchCommand(f"{said}, did you mean `{near}`?", ctx, f"`{path} {near} -h` explains it")
        if self.of_a_run and _RUN.fullmatch(word):
            run = word if word.startswith("@") else word.partition("@")[0]
            typed = " ".join((path, self.of_a_run, run, *map(shlex.quote, rest)))
            return NoSuchCommand(f"`{word}` is no command", ctx, typed)
        return NoSuchCommand(said, ctx, "")

    def _elsewhere(self, word: str, ctx: click.Context) -> str:
        """Return the command if exactly one verb has this name, at the top or in a group; empty otherwise."""
        root = ctx.find_root()
        assert isinstance(root.command, click.Group)
        names = root.command.list_commands(root) if word not in _AMBIGUOUS else []
        groups = [(name, root.command.get_command(root, name)) for name in names]
        found = [
            f"orch {name} {word}"
            for name, group in groups
            if isinstance(group, click.Group) and word in group.list_commands(ctx)
        ]
        found += [f"orch {word}"] if word in names else []
        return found[0] if len(found) == 1 else ""


DELETED_BY_ORCH = (
    "orch deletes checkpoints itself, by checkpoint.keep and checkpoint.retention; "
    "`orch rm -h` explains how a run is removed with all that it has"
)
_DELETE = frozenset({"rm", "remove", "delete"})
"""Words for deleting one checkpoint, never answered with the verb that removes its whole run."""
_AMBIGUOUS = frozenset({"diff", "history", "install", "ls", "path", "rm", "run", "show", "start", "stop"})
"""Verbs that mean something else in another group: `orch stop RUN` must not suggest to stop the controller."""
_RUN = re.compile(r"@last|[\w.-]*-\d+(@\w+)?")
"""Pattern of names of runs and their checkpoints."""


class NoSuchCommand(click.UsageError):
    """Error for an unknown verb; `hint` is the command to type."""

    def __init__(self, message: str, ctx: click.Context, hint: str) -> None:
        super().__init__(message, ctx)
        self.hint = hint


class LazyGroup(Noun):
    """A group that imports a verb's module only when the verb is used, never for `orch --help`."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **more: Any) -> None:
        super().__init__(*args, **more)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module, _, name = self._table[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Return the verbs and their purpose without importing their modules, then the options."""
        from click.shell_completion import CompletionItem  # only when a shell asks

        verbs = [
            CompletionItem(name, help=text) for name, (_, text) in self._table.items() if name.startswith(incomplete)
        ]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs and their purpose without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])
