"""PURE: assignment of the entries of a folder to checkpoints of a user's own program.
Programs write a file per rank, or one for the model and one for the optimizer. All files of one step are one
checkpoint: ranks that load different steps silently train a mixture.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from trainer.protocol.command_progress import SET_ASIDE, CommandCheckpointsConfig, parse_digits

_NUMBER = re.compile(r"\d+", re.ASCII)
_RANK = re.compile(r"(?<![a-z])(rank[-_=]?)(\d+)", re.IGNORECASE | re.ASCII)
_TEMPORARY = re.compile(r"(?<![a-z])(tmp|temp|partial|incomplete|lock|bak|old)(?![a-z])", re.IGNORECASE)
"""Remains of an interrupted save, which belong to no checkpoint."""


def group(names: Collection[str], config: CommandCheckpointsConfig, most: int) -> list[tuple[int, str, list[str]]]:
    """Return the newest checkpoints, newest first: step, an entry matching the pattern, names of the other entries."""
    matched: dict[int, list[str]] = defaultdict(list)
    for name in sorted(names):
        if (step := config.parse_step(name)) is not None:
            matched[step].append(name)
    steps = sorted(matched, reverse=True)
    numbered = _by_number(names, steps[: most + 1], config)
    return [
        (step, matched[step][0], _siblings(matched[step][0], step, numbered, steps[at + 1 : at + 2], config))
        for at, step in enumerate(steps[:most])
    ]


def _by_number(
    names: Iterable[str], steps: Collection[int], config: CommandCheckpointsConfig
) -> dict[int, list[str]]:  # fmt: skip
    """Return names by each of the steps that occurs in them."""
    found: dict[int, list[str]] = {step: [] for step in steps}
    words = len(_TEMPORARY.findall(config.pattern))
    for name in names:
        if name.startswith(SET_ASIDE) or len(_TEMPORARY.findall(name)) > words:
            continue
        # The pattern may take only a part of a number as the step.
        for number in found.keys() & {config.parse_step(name), *map(parse_digits, _NUMBER.findall(name))}:
            found[number].append(name)
    return found


def _siblings(
    main: str, step: int, numbered: Mapping[int, list[str]], older: Collection[int], config: CommandCheckpointsConfig
) -> list[str]:
    prefix = config.name_prefix(main)
    # A name whose first number is the step belongs to it if every step has one: `optimizer-30.pt` beside `model-30.pt`.
    alone = not _NUMBER.search(prefix)
    forms = {_form(name, number) for number in older for name in numbered[number]} if alone else set()
    ranks = same_but_for_rank(main, numbered[step])
    return sorted(
        name for name in numbered[step]
        if name != main and config.parse_step(name) in (None, step) and (
            config.parse_step(name) == step
            or _begins(name, prefix, step)
            or name in ranks
            or ((form := _form(name, step)) and form in forms)
        )
    )  # fmt: skip


def _begins(name: str, prefix: str, step: int) -> bool:
    """Return whether a name begins with the prefix and the step."""
    digits = _NUMBER.match(name, len(prefix))
    return name.startswith(prefix) and digits is not None and parse_digits(digits[0]) == step


def _form(name: str, step: int) -> str:
    """Return the name without its first number if that is the step; else ""."""
    first = _NUMBER.search(name)
    if first is None or parse_digits(first[0]) != step:
        return ""
    return f"{name[: first.start()]}#{name[first.end() :]}"


def has_rank(name: str) -> bool:
    """Return whether a name appears to contain a rank number."""
    return _RANK.search(name) is not None


def same_but_for_rank(name: str, others: Iterable[str]) -> list[str]:
    """Return the names that differ from this one only in the rank number, if rank 0 is among them.
    Without a rank 0 the number has another meaning: `lora-rank8` beside `lora-rank16`.
    """
    if not has_rank(name):
        return []
    alike = [other for other in others if _RANK.sub(r"\1#", other) == _RANK.sub(r"\1#", name)]
    has_first = any(int(number) == 0 for each in (name, *alike) for _, number in _RANK.findall(each))
    return sorted(other for other in alike if other != name) if has_first else []


def find_digits(name: str, step: int) -> str:
    """Return the last number in a name that is the step, as it is written there; the step if none is."""
    return next((digits for digits in reversed(_NUMBER.findall(name)) if parse_digits(digits) == step), str(step))


def counterpart(name: str, main: str, other_main: str, others: Iterable[str]) -> str | None:
    """Return the entry of another step that corresponds to this one, such as the same rank's; None if none does.
    `main` and `other_main` are the entries that the pattern matches; where their numbers differ, such as in the step,
    the numbers of the two entries may differ too.
    """
    if not is_alike(main, other_main):
        return None
    free = _differences(main, other_main)
    alike = [other for other in others if is_alike(name, other) and _differences(name, other) <= free]
    return min(alike, key=lambda other: len(_differences(name, other)), default=None)


def _differences(name: str, other: str) -> set[int]:
    pairs = zip(_NUMBER.findall(name), _NUMBER.findall(other), strict=True)
    return {at for at, (one, two) in enumerate(pairs) if int(one) != int(two)}


def is_alike(name: str, other: str) -> bool:
    """Return whether two names differ only in their numbers."""
    return _NUMBER.sub("#", name) == _NUMBER.sub("#", other)
