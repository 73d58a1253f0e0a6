"""What somebody meant who has typed an option that a verb does not have."""

from collections.abc import Sequence

import click

_MEANT = {"-n": "--tail", "--lines": "--tail"}
"""Options of other programs for what an option of ours does."""


def what_to_type(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """The option or the key of the configuration that is meant, as it is typed here; empty where none is near."""
    given, value = error.option_name, _value(error.option_name, words)
    options = [option for item in error.ctx.command.params for option in item.opts] if error.ctx else []
    if _MEANT.get(given) in options:
        return f"did you mean {' '.join(filter(None, (_MEANT[given], value)))}?"
    if error.ctx is None or not any("KEY=VALUE" in str(item.metavar) for item in error.ctx.command.params):
        return ""
    from orchestrator.config import keys  # only for a mistake

    key = keys.meant(given.lstrip("-").replace("-", "_"))
    return f"a key is typed without dashes: {key}={value or 'VALUE'}" if key else ""


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
