"""What a rank's log says of the moment when the process was aborted: the rank itself could tell nothing more."""

import re
from pathlib import Path

from trainer.contract.log_files import read_tail
from trainer.contract.rank_messages import generation_mark

_TAIL = 16384
_WHAT = re.compile(r"^[ \t]*what\(\):[ \t]*(\S.*)$", re.MULTILINE)
"""How the C++ runtime tells an exception that nobody has caught; `\\s` would look over all blank lines from each."""


def last_cpp_exception(log: Path, generation: int) -> str | None:
    """The newest uncaught C++ exception of this generation in a rank's log; None when there is none."""
    try:
        text = read_tail(log, _TAIL).decode(errors="replace")
    except OSError:
        return None
    return uncaught(text.rpartition(generation_mark(generation))[2])


def uncaught(text: str) -> str | None:
    """The newest uncaught C++ exception that a text tells of."""
    found = _WHAT.findall(text)
    return found[-1].strip() if found else None
