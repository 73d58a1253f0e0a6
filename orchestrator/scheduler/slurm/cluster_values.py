"""PURE: could Slurm read the `cluster` part of a configuration? Whether it has that, only Slurm can tell."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.scheduler.slurm.sbatch_options import time_meant
from orchestrator.scheduler.slurm.sbatch_values import check_field, check_nodes, check_options, check_text, minutes

LONGEST_LEAD = 65535
"""Seconds before the end of a job at which Slurm can signal it at the earliest."""
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu", "tmp")
_TIMES = ("time", "time-min")
_SIZES = ("mem", "mem-per-cpu", "mem-per-gpu")


def faults(section: str, values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """What cannot stand in a job script, key by key; `section` is what the keys lie in, as in `cluster`.

    Keys that are missing from `values` are not checked.
    """
    for name, check in _CHECKS.items():
        try:
            if values.get(name) not in (None, "") or (name == "time" and name in values):
                check(f"{section}.{name}", values[name])
                _check_unit(f"{section}.{name}", name, values[name])
        except ConfigError as error:
            yield error
    try:
        options = check_options(values.get("sbatch") or {}, section)
        for name, value in options.items():
            _check_unit(f"{section}.sbatch.{name}", name, value)
        if "nodelist" in options:
            _hosts(f"{section}.sbatch.nodelist", options["nodelist"])
    except ConfigError as error:
        yield error
        return
    asked = [name for name in _SIZES if name in options or (name == "mem" and values.get("mem"))]
    if len(asked) > 1:
        keys = [f"{section}.mem" if name == "mem" else f"{section}.sbatch.{name}" for name in asked]
        yield ConfigError(
            f"{' and '.join(keys)}: Slurm takes one of them", where=keys[0], hint=" or ".join(f"~{key}" for key in keys)
        )


_FEWEST_MEGABYTES = 1024
"""Below it, memory without a unit was more probably meant in GB than in Slurm's MB."""
_MOST_MINUTES = 1440
"""Above it, a time without a unit was more probably meant in seconds than in Slurm's minutes."""


def _check_unit(key: str, name: str, value: object) -> None:
    """Refuse a bare number that Slurm reads in another unit than most people mean."""
    text = str(value)
    if not re.fullmatch(r"\d+", text, re.ASCII):
        return
    number = int(text)
    if name in _MEMORY and 0 < number < _FEWEST_MEGABYTES:
        what, hint = f"Slurm reads this as {number} MB", f"{key}={number}G, or {key}={number}M for {number} MB"
    elif name in _TIMES and number > _MOST_MINUTES:
        what = f"Slurm reads this as {number} minutes, which are {time_meant(f'{number}m')}"
        hint = f"{key}={time_meant(f'{number}m')}, or {key}={time_meant(f'{number}s')} for {number} seconds"
    else:
        return
    raise ConfigError(f"{key}={text}: {what}", where=key, hint=hint)


def _lead(key: str, value: object) -> None:
    if not isinstance(value, int) or not 0 <= value <= LONGEST_LEAD:
        hint = f"{key}=120 asks for two minutes"
        raise ConfigError(f"{key}={value}: must be from 0 to {LONGEST_LEAD} seconds", where=key, hint=hint)


def _field(name: str, key: str, value: object) -> None:
    check_field(key, name, value)


def _hosts(key: str, value: object) -> None:
    check_nodes(key, (check_text(key, value),))


_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    **{name: partial(_field, name) for name in ("partition", "account", "qos", "constraint", "mem")},
    "exclude": _hosts,
    "time": minutes,
    "signal_lead": _lead,
    "interface": check_text,
    "python": check_text,
}
"""How the value of each key is checked."""
