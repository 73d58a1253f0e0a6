"""What somebody meant who has typed an option that a verb does not have."""

import re
import shlex
from collections.abc import Sequence
from itertools import pairwise

import click

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
