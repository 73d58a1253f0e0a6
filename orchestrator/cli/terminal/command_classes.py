"""Commands that understand the global options before and after the verb, and groups that load verbs late."""

import importlib
from collections.abc import Callable, Mapping, Sequence
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
    if value and not context.resilient_parsing:  # a shell may ask what can follow it
        from importlib.metadata import version  # not needed by any verb

        context.ensure_object(Screen).say(f"orch {version('orch')}")
        context.exit()


def _flag(words: tuple[str, ...], name: str, text: str, **more: Any) -> click.Option:
    return click.Option(
        words, is_flag=True, expose_value=False, is_eager=True, callback=_store(name), help=text, **more
    )


def global_options() -> list[click.Option]:
    """The options that every verb takes, before or after its name."""
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
    """A command with the global options."""

    def __init__(self, *args: Any, **more: Any) -> None:
        more.setdefault("context_settings", _HELP)
        super().__init__(*args, **more)
        for parameter in self.params:
            if parameter.type is click.STRING:
                parameter.type = COMPLETED_TEXT
        self.params += global_options()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verb's own options first, the global ones in a section of their own."""
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
    """A group of verbs about one thing (`orch ckpt ls`)."""

    command_class = Verb

    def __init__(self, *args: Any, **more: Any) -> None:
        more.setdefault("context_settings", _HELP)
        super().__init__(*args, **more)
        self.params += global_options()

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click's, with the nearest right name in the message."""
        word = args[0]
        if self.get_command(ctx, word) is None and not word.startswith("-"):
            near = self._nearest(word.lower(), self.list_commands(ctx))
            ctx.fail(f"no such command `{word}`" + (f", did you mean `{near}`?" if near else ""))
        return super().resolve_command(ctx, args)

    def _nearest(self, word: str, names: Sequence[str]) -> str:
        """What other programs call `word`, else what is spelled nearly so; empty where nothing is."""
        import difflib  # only for an error

        from orchestrator.cli.terminal.synonyms import SYNONYMS

        meant = [name for name in SYNONYMS.get(word, ()) if name in names]
        meant += difflib.get_close_matches(word, [*names, *SYNONYMS], n=1, cutoff=0.75)
        meant += difflib.get_close_matches(word, names, n=1, cutoff=0.6)
        found = next(iter(meant), "")
        return found if found in names else next((name for name in SYNONYMS.get(found, ()) if name in names), "")


class LazyGroup(Noun):
    """The top group: a verb's module is imported when the verb is used, never for `orch --help`."""

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
        """The verbs and their purpose, without loading any of them; then the options."""
        from click.shell_completion import CompletionItem  # only when a shell asks

        verbs = [
            CompletionItem(name, help=text) for name, (_, text) in self._table.items() if name.startswith(incomplete)
        ]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs and their purpose, without loading any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])
