"""Texts of other programs that are too long for a line: cut behind a sentence, a clause or a word."""

_ENDS = (". ", "; ", ", ", " ")
"""Where a text may be cut, best first."""


def cut(text: str, most: int) -> str:
    """Return at most about so many characters of a text, with ` ...` where there is more."""
    if len(text) <= most:
        return text
    for end in _ENDS:
        kept, mark, _ = text[: most + 1].rpartition(end)
        if len(kept) > most // 2:
            return f"{kept}{mark.strip() if mark == '. ' else ''} ..."
    return f"{text[:most]} ..."
