"""`orch completion`: prints the completion script of a shell."""

from pathlib import Path

import click

from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen

SHELLS = ("bash", "zsh", "fish")


@click.command(cls=Verb)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_obj
def completion(screen: Screen, shell: str) -> None:
    """Print the completion script of a shell: bash, zsh or fish.

    \b
    bash, in ~/.bashrc:                eval "$(orch completion bash)"
    zsh, in ~/.zshrc after compinit:   eval "$(orch completion zsh)"
    fish, once:   orch completion fish > ~/.config/fish/completions/orch.fish
    """
    script = Path(__file__).with_name(f"orch.{shell}").read_text()
    if screen.json:
        screen.data("completion", {"shell": shell, "script": script})
        return
    for line in script.splitlines():
        screen.raw(line)
