"""The types of what people type: text that a shell may complete, paths that are not empty, seconds that end."""

import math
from typing import Any

import click
from click.shell_completion import CompletionItem


class CompletedText(click.types.StringParamType):
    """Text; at a Tab, what `orchestrator.cli.completion.candidates` knows of the parameter."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:  # fmt: skip
        from orchestrator.cli.completion.candidates import candidates  # only when a shell asks

        return candidates(ctx, str(param.name), incomplete)


COMPLETED_TEXT = CompletedText()


class Seconds(click.FloatRange):
    """A finite number of seconds: `nan` is neither small nor large, and `inf` never comes."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if isinstance(number, float) and not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number of seconds", param, ctx)
        return number


class NonEmptyPath(click.Path):
    """A path; an empty one, as of an unset shell variable, would mean the current folder and is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).strip():
            name = param.opts[-1] if isinstance(param, click.Option) else _metavar(param)
            raise click.UsageError(f"{name} is empty; type . for this folder", ctx=ctx)
        return super().convert(value, param, ctx)


def _metavar(param: click.Parameter | None) -> str:
    return str(param.metavar or str(param.name).upper()) if param is not None else "the path"
