"""Time spans in Slurm's notation and in words."""

import re
from collections.abc import Callable
from datetime import UTC, datetime

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_NO_LIMIT = ("unlimited", "infinite", "-1")


def is_no_limit(text: str) -> bool:
    """Return whether the text means no limit."""
    return text.strip().lower() in _NO_LIMIT


def seconds(text: str) -> int:
    """Convert `90`, `1:30:00`, `2-12` or `2-12:00:00` to seconds. Raises ValueError for anything else."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text}: not in Slurm's notation (minutes, h:mm:ss, d-hh:mm:ss)")
    first, second, third = (int(part or 0) for part in match.groups()[1:])
    if match[1] is not None:  # days-hours[:minutes[:seconds]]
        return ((int(match[1]) * 24 + first) * 60 + second) * 60 + third
    if match[4] is not None:  # hours:minutes:seconds
        return (first * 60 + second) * 60 + third
    return first * 60 + second  # minutes[:seconds]


_SPAN = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_span(text: str) -> float | None:
    """Convert a number with a unit (s, m, h or d) to seconds. Return None for anything else."""
    found = _SPAN.fullmatch(text)
    return float(found[1]) * _SECONDS[found[2]] if found else None


def span(seconds: float) -> str:
    """Format a duration for display: `45s`, `6m10s`, `7h02m`, `3d04h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def iso(moment: float | None) -> str | None:
    """Format seconds since the epoch as UTC ISO 8601, as in all JSON answers."""
    if moment is None:
        return None
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_MOMENT = re.compile(r"\b(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z(?!\w)", re.ASCII)


def stored_moment(at: float) -> str:
    """Format a time for a stored sentence, in UTC: `2026-11-22 03:41:20Z`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def show_moments(text: str, show: Callable[[float], str]) -> str:
    """Reformat the times in a stored sentence with `show`."""

    def shown(match: re.Match[str]) -> str:
        try:
            return show(datetime.fromisoformat(f"{match[1]}+00:00").timestamp())
        except ValueError:  # a program's text that only looks like a time
            return match[0]

    return _MOMENT.sub(shown, text)
