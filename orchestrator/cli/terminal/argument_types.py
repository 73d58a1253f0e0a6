"""Types for command-line arguments: text with completion, non-empty paths, finite seconds."""

import math
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from trainer.protocol.time_spans import parse_span


class CompletedText(click.types.StringParamType):
    """Text with completion by `orchestrator.cli.completion.candidates`."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> "list[CompletionItem[str]]":  # fmt: skip  (the class has no type arguments before click 8.5)
        from orchestrator.cli.completion.candidates import candidates  # only when a shell asks

        return candidates(ctx, str(param.name), incomplete)


COMPLETED_TEXT = CompletedText()


class Seconds(click.FloatRange):
    """A finite number of seconds, or a time with its unit (`1m`); `nan` and `inf` are refused."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            span = parse_span(value)
            value = value if span is None else span
        try:
            float(value)
        except ValueError:
            self.fail(f"{value!r} is not a time: type seconds (60), or a number with s, m, h or d (1m)", param, ctx)
        number = super().convert(value, param, ctx)
        if isinstance(number, float) and not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number of seconds", param, ctx)
        return number


def timeout_option(default: float, least: float = 0.0) -> Callable[[Any], Any]:
    """Return the `--timeout` option of a verb that waits; both arguments are in seconds."""
    return click.option(
        "--timeout", type=Seconds(min=least), default=default, show_default=True, metavar="SECONDS",
        help="Give up after this time.",
    )  # fmt: skip


PRIORITIES = {"high": 10, "normal": 0, "low": -10}
_HIGHEST = 1000


class Priority(click.types.StringParamType):
    """A run's rank among the user's own runs, as a word or a whole number."""

    name = "priority"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = PRIORITIES[value] if value in PRIORITIES else int(value)
        except ValueError:
            self.fail(f"{value!r} is not a priority: type high, normal, low or a whole number", param, ctx)
        if abs(number) > _HIGHEST:
            self.fail(f"{value} is not from -{_HIGHEST} to {_HIGHEST}", param, ctx)
        return number


class NonEmptyPath(click.Path):
    """A path. An empty path, from an unset shell variable, would mean the current folder, so it is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).strip():
            name = param.opts[-1] if isinstance(param, click.Option) else _metavar(param)
            raise click.UsageError(f"{name} is empty; type . for this folder", ctx=ctx)
        return super().convert(value, param, ctx)


class ClusterKind(click.Choice[str]):
    """A kind of cluster."""

    def __init__(self) -> None:
        from trainer.protocol.config_sections.scheduler_kinds import choices

        super().__init__(choices())


def _metavar(param: click.Parameter | None) -> str:
    return str(param.metavar or str(param.name).upper()) if param is not None else "the path"
