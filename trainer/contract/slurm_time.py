"""Slurm's notation of time spans: minutes, `h:mm:ss`, `d-hh:mm:ss`."""

import re

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_NO_LIMIT = ("unlimited", "infinite", "-1")


def is_no_limit(text: str) -> bool:
    """Whether this says that there is no limit."""
    return text.strip().lower() in _NO_LIMIT


def seconds(text: str) -> int:
    """`90`, `1:30:00`, `2-12`, `2-12:00:00` in seconds; raises ValueError for anything else."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text}: not in Slurm's notation (minutes, h:mm:ss, d-hh:mm:ss)")
    first, second, third = (int(part or 0) for part in match.groups()[1:])
    if match[1] is not None:  # days-hours[:minutes[:seconds]]
        return ((int(match[1]) * 24 + first) * 60 + second) * 60 + third
    if match[4] is not None:  # hours:minutes:seconds
        return (first * 60 + second) * 60 + third
    return first * 60 + second  # minutes[:seconds]
