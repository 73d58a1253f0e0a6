"""Command classes: global options in any position, lazy groups, and suggestions for unknown verbs and options."""

import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import click

from orchestrator.cli.terminal.argument_types import COMPLETED_TEXT
from orchestrator.cli.terminal.render import Screen


def _store(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value:
            setattr(context.ensure_object(Screen), name, value)

    return callback


def _show_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:  # shell completion also parses it
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
        _flag(("--no-color",), "no_color", "Use no colours (same as NO_COLOR in the environment)."),
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
    """A command with the global options. `json_data` describes its JSON answer for docs/cli.md."""

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
        """Write the verb's own options first, and the global options in a separate section."""
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
    """A group of verbs for one kind of object (`orch ckpt ls`)."""

    command_class = Verb

    def __init__(self, *args: Any, **more: Any) -> None:
        more.setdefault("context_settings", _HELP)
        super().__init__(*args, **more)
        self.params += global_options()

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Resolve as click does, but name the nearest verb in the error."""
        word, path = args[0], ctx.command_path
        if self.get_command(ctx, word) is not None or word.startswith("-"):
            return super().resolve_command(ctx, args)
        from orchestrator.near_words import nearest  # only for a mistake

        near = nearest(word.lower(), self.list_commands(ctx), 0.7)
        meant = f", did you mean `{near}`? `{path} {near} -h` explains it" if near else ""
        raise click.UsageError(f"no such command `{word}`{meant}", ctx)


class LazyGroup(Noun):
    """A group that imports a verb's module only when the verb is used, not for `orch --help`."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **more: Any) -> None:
        """`table`: for each verb, its function (`module:function` below orchestrator.cli) and its purpose."""
        super().__init__(*args, **more)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module, _, name = self._table[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"orchestrator.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Return the verbs with their purposes, without importing their modules, then the options."""
        from click.shell_completion import CompletionItem  # only when a shell asks

        found = [(name, text) for name, (_, text) in self._table.items() if name.startswith(incomplete)]
        return [CompletionItem(name, help=text) for name, text in found] + click.Command.shell_complete(
            self, ctx, incomplete
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs with their purposes, without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])
