"""Suggestions for mistyped words."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word with the closest spelling (`cutoff`: difflib's ratio), or "" if none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(near: str, otherwise: str) -> str:
    """Return a hint that suggests `near`, or `otherwise` if it is empty."""
    return f"did you mean {near}?" if near else otherwise


def hint_with_choices(near: str, choices: str) -> str:
    """Return a hint that suggests `near`, if it is not empty, followed by the choices."""
    return f"did you mean {near}?  {choices}" if near else choices
