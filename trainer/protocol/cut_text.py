"""Cut long texts from other programs at the end of a sentence, a clause or a word."""

_ENDS = (". ", "; ", ", ", " ")
"""Marks after which a text may be cut, best first."""


def cut(text: str, most: int) -> str:
    """Return the text, cut to about `most` characters and followed by ` ...` if it is longer."""
    if len(text) <= most:
        return text
    for end in _ENDS:
        kept, mark, _ = text[: most + 1].rpartition(end)
        if len(kept) > most // 2:
            return f"{kept}{mark.strip() if mark == '. ' else ''} ..."
    return f"{text[:most]} ..."
