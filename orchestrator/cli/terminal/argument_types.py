"""The type of what people type as text: it knows what a shell may offer there."""

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
