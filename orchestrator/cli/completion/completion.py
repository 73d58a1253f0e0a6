"""`orch completion`: print the completion script for a shell."""

from pathlib import Path

import click

from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen

SHELLS = ("bash", "zsh", "fish")


@click.command(cls=Verb, json_data="{shell, script}")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_obj
def completion(screen: Screen, shell: str) -> None:
    """Print the completion script for a shell: bash, zsh or fish.

    \b
    bash 4.4, in ~/.bashrc:            eval "$(orch completion bash)"
    zsh, in ~/.zshrc after compinit:   eval "$(orch completion zsh)"
    fish, once:   orch completion fish > ~/.config/fish/completions/orch.fish

    It completes verbs, options, runs, RUN@STEP, presets, files, configuration keys and some of their values, tags and
    nodes. When you press Tab, the shell starts `orch`, which reads only the registry.
    """
    script = Path(__file__).with_name(f"orch.{shell}").read_text()
    if screen.json:
        screen.data("completion", {"shell": shell, "script": script})
        return
    screen.raw(script.removesuffix("\n"))
