"""The forms that values of sbatch's own options take, as far as Slurm's grammar is the same everywhere; pure."""

import re
from dataclasses import dataclass

_UNITS = ("K", "M", "G", "T")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])I?B?", re.ASCII | re.IGNORECASE)
_SPAN = re.compile(r"(\d+) ?(d|h|m|s)[a-z]*", re.ASCII | re.IGNORECASE)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True)
class Form:
    """What a value must match, and an example for people."""

    pattern: str
    example: str

    def accepts(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value, re.ASCII) is not None


_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
_HOSTS = r"[A-Za-z0-9_.\[][A-Za-z0-9_.,\[\]-]*"
_TIME = r"(?:\d+-)?\d+(?::\d+){0,2}"

MEMORY = Form(r"[0-9]+([KMGTkmgt][Bb]?)?", "a whole number with K, M, G or T: 64G")
HOSTS = Form(_HOSTS, "a host list: gpu[003,017]")
_NUMBER = Form(r"\d+", "a whole number")
_TIME_LIMIT = Form(_TIME, "minutes, H:MM:SS or D-HH:MM:SS: 2-00:00:00")
_GPUS = Form(rf"({_WORD}:)?\d+(,({_WORD}:)?\d+)*", "a number of GPUs, or their type and number: a100:2")
_GRES = Form(
    r"(gres/)?[A-Za-z_][\w/.-]*(:[A-Za-z_][\w.-]*)?(:\d+[KMGTkmgt]?)?"
    r"(,(gres/)?[A-Za-z_][\w/.-]*(:[A-Za-z_][\w.-]*)?(:\d+[KMGTkmgt]?)?)*",
    "names with numbers: gpu:a100:2",
)
_MAIL = "NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(_[589]0)?|ARRAY_TASKS"

FORMS: dict[str, Form] = {
    **dict.fromkeys(("mem-per-cpu", "mem-per-gpu", "tmp"), MEMORY),
    **dict.fromkeys(
        ("cores-per-socket", "sockets-per-node", "threads-per-core", "cpus-per-gpu", "core-spec", "thread-spec",
         "mincpus", "delay-boot"),
        _NUMBER,
    ),
    **dict.fromkeys(("gpus", "gpus-per-socket"), _GPUS),
    "nice": Form(r"-?\d+", "a whole number"),
    "priority": Form(r"\d+|TOP", "a whole number, or TOP"),
    "time-min": _TIME_LIMIT,
    "gres": _GRES,
    "licenses": Form(rf"{_WORD}(@{_WORD})?(:\d+)?([,;|]{_WORD}(@{_WORD})?(:\d+)?)*", "names with numbers: matlab:1"),
    "nodelist": HOSTS,
    "reservation": Form(rf"{_WORD}(,{_WORD})*", "the name of a reservation"),
    "switches": Form(rf"\d+(@{_TIME})?", "a number of switches, and how long to wait for them: 1@60"),
    "mail-type": Form(rf"(?i:({_MAIL})(,({_MAIL}))*)", "some of BEGIN, END, FAIL, ALL, separated by commas"),
    "exclusive": Form("user|mcs|topo", "true, user, mcs or topo"),
    "hint": Form("(compute|memory)_bound|(no)?multithread", "compute_bound, memory_bound or nomultithread"),
}  # fmt: skip
"""What the values of some options must look like; of all others only Slurm can tell."""

FLAGS = frozenset({"contiguous", "ignore-pbs", "overcommit", "reboot", "spread-job", "stepmgr", "use-min-nodes"})
"""Options that take no value: they are set by `true`."""
WITH_OR_WITHOUT = frozenset({"exclusive", "nice"})
"""Options that may stand without their value."""


def memory_meant(text: str) -> str:
    """What somebody who wrote `8GiB` or `1.5 G` means, in Slurm's notation; empty where that is not clear."""
    found = _MEMORY.fullmatch(text.strip())
    if found is None:
        return ""
    number, unit = float(found[1]), found[2].upper()
    if number.is_integer():
        return f"{int(number)}{unit}"
    smaller = _UNITS[max(0, _UNITS.index(unit) - 1)]
    return f"{round(number * 1024)}{smaller}" if smaller != unit else ""


def time_meant(text: str) -> str:
    """What somebody who wrote `1h` or `2d 12h` means, in Slurm's notation; empty where that is not clear."""
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text).strip():
        return ""
    seconds = sum(int(number) * _SECONDS[unit.lower()] for number, unit in parts)
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock.zfill(8)}" if days else clock
