"""Command classes: global options at any place, lazy groups, and suggestions for unknown verbs and options."""

import importlib
import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import click

from orchestrator.cli.terminal.argument_types import COMPLETED_TEXT
from orchestrator.cli.terminal.render import Screen

SYNONYMS: dict[str, tuple[str, ...]] = {
    word: meant
    for words, meant in {
        "kill stop abort scancel terminate quit halt": ("cancel", "stop"),
        "delete del remove erase purge prune destroy": ("rm", "unpin", "cancel"),
        "clean cleanup": ("gc", "rm"),
        "ps list ls queue squeue jobs runs stat state sinfo": ("status", "ls"),
        "describe info inspect get details sacct explain": ("show", "status", "ls"),
        "why reason": ("show",),
        "restart retry continue requeue rerun unhold go": ("resume", "start"),
        "tail log cat output stdout stderr print": ("logs",),
        "timeline history audit journal event": ("events", "history"),
        "run start launch sbatch srun train create new": ("submit", "start", "run"),
        "monitor watch htop dashboard": ("top",),
        "stack stacks pystack py-spy trace debug": ("attach",),
        "checkpoint checkpoints snapshot snapshots": ("ckpt",),
        "save-now": ("save",),
        "check validate verify test diagnose": ("verify", "validate", "doctor"),
        "inject chaos fault": ("drill",),
        "undrain uncordon include allow": ("release",),
        "drain cordon avoid ban block": ("exclude",),
        "daemon server": ("controller",),
        "registry database": ("db",),
        "tokenize tokenise preprocess convert shard": ("prepare", "data"),
        "download pull": ("export",),
        "upload push load": ("import", "submit"),
        "restore rollback": ("restore-test", "resume"),
        "init setup login": ("doctor",),
        "version": ("doctor",),
        "example try tutorial": ("demo",),
    }.items()
    for word in words.split()
    for meant in [meant]
}
"""For each word the verbs that may be meant; the first one that there is counts."""


_MEANT = {"-n": "--tail", "--lines": "--tail", "--force": "--yes", "-f": "--yes"}
"""Options of other programs for what an option of ours does."""
_OF_SLURM = {
    "-p": "cluster.partition", "-A": "cluster.account", "-N": "cluster.nodes", "-c": "cluster.cpus_per_task",
    "-C": "cluster.constraint", "-x": "cluster.exclude",
}  # fmt: skip
"""Short options of sbatch for a key; long ones, and torchrun's, are in `config.keys`."""
_FOLLOWING = ("-f", "--follow")
"""What `orch submit` has, and verbs have not that act on a run that is there."""
_SETTING = frozenset({"--set", "--override", "--overrides", "--opt", "--option", "--config", "-o", "-O", "-s", "-D"})
"""What stands before KEY=VALUE in other programs."""


def what_to_type(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """The option or the key of the configuration that is meant, as it is typed here; empty where none is near."""
    if (whole := _unquoted(words)) is not None:
        return f"the shell broke it at its blanks; put it in quotes: {shlex.quote(whole)}"
    given, value = error.option_name, _value(error.option_name, words)
    options = [option for item in error.ctx.command.params for option in item.opts] if error.ctx else []
    if _MEANT.get(given) in options:
        shown = "NUMBER" if _MEANT[given] == "--tail" and not value.isdigit() else value
        return f"did you mean {' '.join(filter(None, (_MEANT[given], shown)))}?"
    if given in _FOLLOWING and (names := [word for word in words[1:] if not word.startswith("-") and "=" not in word]):
        return f"leave it out; `orch events {shlex.quote(names[0])} -f` follows the run"
    if error.ctx is None or not any("KEY=VALUE" in str(item.metavar) for item in error.ctx.command.params):
        return ""
    from orchestrator.config import keys  # only for a mistake

    following = next((later for word, later in pairwise(words) if word == given), "")
    if given in _SETTING and "=" in following:
        return f"a key is typed without an option: {shlex.quote(following)}"
    key = _OF_SLURM.get(given) or keys.meant(given.lstrip("-").replace("-", "_"))
    return f"a key is typed without dashes: {key}={value or 'VALUE'}" if key else ""


def _unquoted(words: Sequence[str]) -> str | None:
    """`KEY=[A, B]` that a shell has broken at its blanks, put together; None where there is none."""
    for begin, word in enumerate(words):
        if re.match(r"[\w.]+=\[[^\]]*$", word):
            for end in range(begin + 1, len(words)):
                if words[end].endswith("]"):
                    return " ".join(words[begin : end + 1])
    return None


def _value(option: str, words: Sequence[str]) -> str:
    """What was typed behind an option, or with it."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if word == option:
            return "" if following.startswith("-") or "=" in following else following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if len(option) == 2 and word.startswith(option) and not word.startswith("--"):
            return word[2:]
    return ""


def without_extra(path: str, message: str, words: Sequence[str]) -> str:
    """The command line that is meant where a step or a rank is typed apart from its run; empty where that is not so."""
    extra = re.search(r"unexpected extra argument \((\S+)\)", message)
    if extra is None or extra[1] not in words[1:]:
        return ""
    at = list(words).index(extra[1])
    if not extra[1].isdigit():
        verb = " ".join(path.split()[1:])
        return f"`{path} {shlex.quote(extra[1])}` is another command: one run at a time" if verb in _OF_ONE_RUN else ""
    if path == "orch logs":
        return f"orch {shlex.join([*words[:at], '--rank', *words[at:]])}"
    *group, verb = path.split()
    if group == ["orch", "ckpt"] and verb in _OF_CHECKPOINTS and not words[at - 1].startswith("-"):
        return f"orch {shlex.join([*words[: at - 1], f'{words[at - 1]}@{extra[1]}', *words[at + 1 :]])}"
    return ""


_OF_ONE_RUN = frozenset({"show", "wait", "top", "events", "logs", "attach", "save", "ckpt ls"})
_OF_CHECKPOINTS = frozenset({"verify", "restore-test", "pin", "unpin"})


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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; refuses a long option that was typed with one dash."""
        long = {name for parameter in self.params for name in parameter.opts if name.startswith("--")}
        for word in itertools.takewhile(lambda word: word != "--", args):
            if word.startswith("-") and not word.startswith("--") and f"-{word}".partition("=")[0] in long:
                raise click.NoSuchOption(word, possibilities=[f"-{word}"], ctx=ctx)
        return super().parse_args(ctx, args)

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
    """A group of verbs about one thing (`orch ckpt ls`); `of_a_run`: the one that is meant by a run alone."""

    command_class = Verb

    def __init__(self, *args: Any, of_a_run: str = "", **more: Any) -> None:
        more.setdefault("context_settings", _HELP)
        super().__init__(*args, **more)
        self.params += global_options()
        self.of_a_run = of_a_run

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click's, with the nearest right name in the message."""
        word = args[0]
        if self.get_command(ctx, word) is None and not word.startswith("-"):
            raise self._no_such(word, args[1:], ctx)
        return super().resolve_command(ctx, args)

    def _no_such(self, word: str, rest: Sequence[str], ctx: click.Context) -> "NoSuchCommand":
        """The error for a word that is no verb here: one with the name in another group, a near one, or a run."""
        path, names = ctx.command_path, self.list_commands(ctx)
        said = f"no such command `{word}`"
        if word == "help":
            verb = " ".join(map(shlex.quote, rest[:2]))
            return NoSuchCommand(said, ctx, " ".join(filter(None, (path, verb, "-h"))))
        if (instead := _INSTEAD.get((path, _REMOVE.get(word, word)))) is not None:
            return NoSuchCommand(said, ctx, instead)
        near, found = self._nearest(_REMOVE.get(word, word.lower()), names), self._elsewhere(ctx, names)
        if word in found and (ctx.parent is None or not near):
            return NoSuchCommand(said, ctx, " ".join(("orch", found[word], *map(shlex.quote, rest))))
        if near:
            return NoSuchCommand(f"{said}, did you mean `{near}`?", ctx, f"`{path} {near} -h` explains it")
        if self.of_a_run and _RUN.fullmatch(word):
            run = word if word.startswith("@") else word.partition("@")[0]
            typed = " ".join((path, self.of_a_run, run, *map(shlex.quote, rest)))
            return NoSuchCommand(f"`{word}` is no command", ctx, typed)
        return NoSuchCommand(said, ctx, "")

    def _elsewhere(self, ctx: click.Context, names: Sequence[str]) -> dict[str, str]:
        """Verbs of the other level as they are typed after `orch`, by their names."""
        if ctx.parent is not None:
            root = ctx.parent.command
            return {name: name for name in root.list_commands(ctx.parent)} if isinstance(root, click.Group) else {}
        groups = [(name, self.get_command(ctx, name)) for name in reversed(names)]
        return {
            verb: f"{name} {verb}"
            for name, group in groups
            if isinstance(group, click.Group)
            for verb in group.list_commands(ctx)
            if verb not in _ANYWHERE
        }

    def _nearest(self, word: str, names: Sequence[str]) -> str:
        """What other programs call `word`, else what is spelled nearly so; empty where nothing is."""
        from orchestrator.cli.terminal.command_classes import SYNONYMS  # only for an error
        from orchestrator.near_words import nearest

        meant = [name for name in SYNONYMS.get(word, ()) if name in names]
        found = next(iter(meant), "") or nearest(word, [*names, *SYNONYMS], 0.75) or nearest(word, names)
        return found if found in names else next((name for name in SYNONYMS.get(found, ()) if name in names), "")


_RUN = re.compile(r"@last|[\w.-]*-\d+(@\w+)?")
"""How names of runs, and of checkpoints of them, look."""
DELETED_BY_ORCH = (
    "orch deletes checkpoints itself, by checkpoint.keep and checkpoint.retention; "
    "`orch rm -h` explains how a run is removed with all that it has"
)
_INSTEAD = {("orch ckpt", word): DELETED_BY_ORCH for word in ("remove", "delete", "del", "prune", "purge", "erase")}
"""What there is for a verb that is missing on purpose."""
_REMOVE = {"rm": "remove"}
"""A verb of ours for runs is another program's word for what a group has."""
_ANYWHERE = frozenset({"diff", "history", "install", "ls", "path", "run", "show", "start", "stop"})
"""Verbs of groups that mean something else, or nothing certain, without their group."""


class NoSuchCommand(click.UsageError):
    """`hint`: what to type."""

    def __init__(self, message: str, ctx: click.Context, hint: str) -> None:
        super().__init__(message, ctx)
        self.hint = hint


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
