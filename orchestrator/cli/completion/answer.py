"""The answer to one Tab: a command line up to the cursor becomes lines that the shell's script reads."""

from collections.abc import Iterator

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

VARIABLE = "_ORCH_COMPLETE"
"""Set by the scripts to the command line up to the cursor: the program answers instead of doing anything."""
OPEN, FILE = "open", "file"
"""Types of a candidate beside the usual `plain`: more is to be typed without a space; names of files."""


def answer(program: click.Command, line: str) -> Iterator[str]:
    """`KIND<tab>VALUE<tab>TEXT` for each candidate; KIND is `word`, `open` (no space after it) or `file`."""
    words = split_arg_string(line)
    incomplete = "" if line[-1:].isspace() or len(words) < 2 else words.pop()
    try:
        found = ShellComplete(program, {}, "orch", VARIABLE).get_completions(words[1:], incomplete)
    except click.UsageError:  # the line is wrong already
        return
    for item in found:
        yield "\t".join((_kind(item), *(" ".join(str(text or "").split()) for text in (item.value, item.help))))


def _kind(item: "CompletionItem[str]") -> str:
    if item.type in (FILE, "dir"):
        return FILE
    return OPEN if item.type == OPEN else "word"
