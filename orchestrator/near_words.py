"""Suggestions for mistyped words."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word spelled most like this one (`cutoff`: difflib's ratio); empty if none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(near: str, otherwise: str) -> str:
    """Return a hint with the near word, or `otherwise` if it is empty."""
    return f"did you mean {near}?" if near else otherwise


def hint_with_choices(near: str, all_of_them: str) -> str:
    """Return a hint with the near word, if any, followed by all words."""
    return f"did you mean {near}?  {all_of_them}" if near else all_of_them
