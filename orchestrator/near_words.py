"""The word that somebody means who has mistyped one."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that is spelled most like this one (`cutoff`: difflib's ratio); empty where none is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(near: str, otherwise: str) -> str:
    """A hint that names what is near; `otherwise` where nothing is."""
    return f"did you mean {near}?" if near else otherwise


def did_you_mean_of(near: str, all_of_them: str) -> str:
    """A hint that names what is near, before all that there is."""
    return f"did you mean {near}?  {all_of_them}" if near else all_of_them
