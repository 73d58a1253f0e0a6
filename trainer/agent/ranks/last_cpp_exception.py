"""The C++ exception in a rank's log, for a process that was aborted and could report nothing itself."""

import re
from pathlib import Path

from trainer.contract.logs.log_rotation import read_tail
from trainer.contract.ranks.rank_messages import generation_mark

_TAIL = 16384
_WHAT = re.compile(r"^[ \t]*what\(\):[ \t]*(\S.*)$", re.MULTILINE)
"""How the C++ runtime prints an uncaught exception; `\\s` would look over all blank lines from each."""


def last_cpp_exception(log: Path, generation: int) -> str | None:
    """The newest uncaught C++ exception of this generation in a rank's log; None when there is none."""
    try:
        text = read_tail(log, _TAIL).decode(errors="replace")
    except OSError:
        return None
    return uncaught(text.rpartition(generation_mark(generation))[2])


def uncaught(text: str) -> str | None:
    """The newest uncaught C++ exception in a text."""
    found = _WHAT.findall(text)
    return found[-1].strip() if found else None
