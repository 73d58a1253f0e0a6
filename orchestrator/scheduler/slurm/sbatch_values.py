"""Allowed values of sbatch options. Pure.

Even a quoted newline ends the comment line of an sbatch script, and the next line would run as a command. So control
characters are refused everywhere, and each field accepts only Slurm's grammar for it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.near_words import nearest
from trainer.protocol import time_spans

_UNITS = ("K", "M", "G", "T")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])I?B?", re.ASCII | re.IGNORECASE)
_SPAN = re.compile(r"(\d+) ?(d|h|m|s)[a-z]*", re.ASCII | re.IGNORECASE)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True)
class ValueFormat:
    """Pattern of a value, and an example for messages."""

    pattern: str
    example: str

    def accepts(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value, re.ASCII) is not None


_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
_HOSTS = r"[A-Za-z0-9_.\[][A-Za-z0-9_.,\[\]-]*"
_TIME = r"(?:\d+-)?\d+(?::\d+){0,2}"

MEMORY = ValueFormat(r"[0-9]+([KMGTkmgt][Bb]?)?", "a whole number with K, M, G or T: 64G")
HOSTS = ValueFormat(_HOSTS, "a host list: gpu[003,017]")
_NUMBER = ValueFormat(r"\d+", "a whole number")
_TIME_LIMIT = ValueFormat(_TIME, "minutes, H:MM:SS or D-HH:MM:SS: 2-00:00:00")
_GPUS = ValueFormat(rf"({_WORD}:)?\d+(,({_WORD}:)?\d+)*", "a number of GPUs, or their type and number: a100:2")
_GRES = ValueFormat(
    r"(gres/)?[A-Za-z_][\w/.-]*(:[A-Za-z_][\w.-]*)?(:\d+[KMGTkmgt]?)?"
    r"(,(gres/)?[A-Za-z_][\w/.-]*(:[A-Za-z_][\w.-]*)?(:\d+[KMGTkmgt]?)?)*",
    "names with numbers: gpu:a100:2",
)
_MAIL = "NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(_[589]0)?|ARRAY_TASKS"

FORMS: dict[str, ValueFormat] = {
    **dict.fromkeys(("mem-per-cpu", "mem-per-gpu", "tmp"), MEMORY),
    **dict.fromkeys(
        ("cores-per-socket", "sockets-per-node", "threads-per-core", "cpus-per-gpu", "core-spec", "thread-spec",
         "mincpus", "delay-boot"),
        _NUMBER,
    ),
    **dict.fromkeys(("gpus", "gpus-per-socket"), _GPUS),
    "nice": ValueFormat(r"-?\d+", "a whole number"),
    "priority": ValueFormat(r"\d+|TOP", "a whole number, or TOP"),
    "time-min": _TIME_LIMIT,
    "gres": _GRES,
    "licenses": ValueFormat(rf"{_WORD}(@{_WORD})?(:\d+)?([,;|]{_WORD}(@{_WORD})?(:\d+)?)*",
    "names with numbers: matlab:1"),
    "nodelist": HOSTS,
    "reservation": ValueFormat(rf"{_WORD}(,{_WORD})*", "the name of a reservation"),
    "switches": ValueFormat(rf"\d+(@{_TIME})?", "a number of switches, and how long to wait for them: 1@60"),
    "mail-type": ValueFormat(rf"(?i:({_MAIL})(,({_MAIL}))*)", "some of BEGIN, END, FAIL, ALL, separated by commas"),
    "exclusive": ValueFormat("user|mcs|topo", "true, user, mcs or topo"),
    "hint": ValueFormat("(compute|memory)_bound|(no)?multithread", "compute_bound, memory_bound or nomultithread"),
}  # fmt: skip
"""Formats of some options' values; only Slurm can check the others."""

FLAGS = frozenset({"contiguous", "ignore-pbs", "overcommit", "reboot", "spread-job", "stepmgr", "use-min-nodes"})
"""Options without a value, set by `true`."""
WITH_OR_WITHOUT = frozenset({"exclusive", "nice"})
"""Options whose value is optional."""


def memory_meant(text: str) -> str:
    """Return the intended value of `8GiB` or `1.5 G` in Slurm's notation; empty if unclear."""
    found = _MEMORY.fullmatch(text.strip())
    if found is None:
        return ""
    number, unit = float(found[1]), found[2].upper()
    if number.is_integer():
        return f"{int(number)}{unit}"
    smaller = _UNITS[max(0, _UNITS.index(unit) - 1)]
    return f"{round(number * 1024)}{smaller}" if smaller != unit else ""


def time_meant(text: str) -> str:
    """Return the intended value of `1h` or `2d 12h` in Slurm's notation; empty if unclear."""
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text).strip():
        return ""
    seconds = sum(int(number) * _SECONDS[unit.lower()] for number, unit in parts)
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock.zfill(8)}" if days else clock


_NAME = r"[A-Za-z0-9_.@+][A-Za-z0-9_.@+:-]*"
_FIELDS = {
    "name": (r"[A-Za-z0-9_.][A-Za-z0-9_.+-]{0,199}", "letters, digits, '.', '_', '-'"),
    "comment": (r"[A-Za-z0-9_./:][A-Za-z0-9_./:@+-]{0,255}", "letters, digits and ./:_-"),
    "partition": (rf"{_NAME}(,{_NAME})*", "a partition name, or several with commas: gpu,gpu-long"),
    "account": (_NAME, "an account name"),
    "qos": (_NAME, "a QOS name"),
    "constraint": (r"[A-Za-z0-9_.\[(][A-Za-z0-9_.,&|*()\[\]:+-]*", "node features: h100&ib"),
    "mem": (MEMORY.pattern, MEMORY.example),
    "nodes": (HOSTS.pattern, HOSTS.example),
}
_FREE = re.compile(r"[A-Za-z0-9_./:@+%=\[(][A-Za-z0-9_./:@+%=,;&|*()\[\]!^~ -]*", re.ASCII)
_OPTION = re.compile(r"[a-z][a-z]*(-[a-z]+)*", re.ASCII)
_BY_KEY = "set it by its own key"
OWNED = {
    **dict.fromkeys(("partition", "account", "qos", "constraint", "exclude", "mem", "time"), f"{_BY_KEY}: cluster."),
    "nodes": "set cluster.nodes",
    "cpus-per-task": "set cluster.cpus_per_task",
    "gpus-per-node": "set cluster.gpus_per_node",
    "signal": "set cluster.signal_lead: the agents wait for USR2",
    "job-name": "orch finds its jobs by their name",
    "comment": "orch marks its jobs by their comment",
    "hold": "orch submits every job held and releases it itself",
    "requeue": "orch starts new attempts itself, on other nodes if need be",
    "no-requeue": "orch sets it itself",
    "array": "one run is one job",
    "dependency": "orch decides when an attempt starts; for an order of runs: `orch wait RUN && orch submit ...`",
    "begin": "a held job is released by orch",
    "export": "a job's variables come from `env`",
    "export-file": "a job's variables come from `env`",
    "get-user-env": "a job's variables come from `env`",
    "wrap": "the job's script is orch's",
    "chdir": "jobs start in their run directory",
    "parsable": "orch reads sbatch's answer",
    "quiet": "orch reads sbatch's answer",
    "verbose": "orch reads sbatch's answer",
    "test-only": "use `orch submit --dry-run`",
    "wait": "use `orch submit --wait`",
    "wait-all-nodes": "the agents wait for each other",
    "kill-on-invalid-dep": "orch uses no dependencies",
    "output": "logs lie in the run directory",
    "error": "logs lie in the run directory",
    "input": "the job's script is orch's",
    "open-mode": "logs are appended to",
    "clusters": "look-ups ask one cluster: set SLURM_CONF or SLURM_CLUSTERS",
    "uid": "jobs are yours",
    "gid": "jobs are yours",
    "batch": "the job's script may run on any of its nodes",
    "help": "see man sbatch",
    "usage": "see man sbatch",
    "version": "use `orch doctor`",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "gpus-per-task",
         "tres-per-task"),
        "one agent per node starts all ranks",
    ),
}  # fmt: skip
"""Options that `cluster.sbatch` cannot set, each with the reason or the alternative."""


def _printable(value: str) -> str:
    return repr(value if len(value) <= 60 else value[:57] + "...")


def _plain(key: str, value: object) -> str:
    """Return the value as text on one line; raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{key}={value!r}: must be text", where=key, hint=f"put it in quotes: {key}='...'")
    if any(not char.isprintable() for char in value):
        raise ConfigError(
            f"{key}={_printable(value)}: newlines and control characters are refused",
            where=key,
            hint=f"write {key} on one line, in plain characters",
        )
    return value


def check_text(key: str, value: object) -> str:
    """Return the value as text; raises ConfigError for control characters, and for a leading dash."""
    text = _plain(key, value)
    if text.startswith("-"):
        raise ConfigError(
            f"{key}={_printable(text)}: must not begin with '-'", where=key, hint="it would be read as another option"
        )
    return text


def check_field(key: str, field: str, value: object) -> str:
    """Return a valid value of a known field (see `_FIELDS`); raises ConfigError that names `key` and the remedy."""
    text = _plain(key, value)
    pattern, example = _FIELDS[field]
    if not re.fullmatch(pattern, text, re.ASCII):
        meant = memory_meant(text) if field == "mem" else ""
        hint = f"{key}={meant}" if meant else f"{key} takes {example}"
        raise ConfigError(f"{key}={_printable(text)}: Slurm cannot read this", where=key, hint=hint)
    return text


def minutes(key: str, value: object) -> int:
    """Return a time limit in Slurm's notation in whole minutes, rounded up as in Slurm; raises ConfigError."""
    text = str(value)
    hint = f"{key} takes minutes, H:MM:SS or D-HH:MM:SS: {key}=2-00:00:00"
    try:
        seconds = time_spans.seconds(text)
    except ValueError as error:
        longest = "7-00:00:00; a longer run continues in a new attempt"
        meant = longest if time_spans.is_no_limit(text) else time_meant(text)
        what = f"{key}={_printable(text)}: Slurm cannot read this as a time limit"
        raise ConfigError(what, where=key, hint=f"{key}={meant}" if meant else hint) from error
    if seconds <= 0:
        raise ConfigError(f"{key}={_printable(text)}: must be longer than nothing", where=key, hint=hint)
    return math.ceil(seconds / 60)


def check_nodes(key: str, names: tuple[str, ...]) -> str:
    """Return one host list of all these names and host lists, empty for none; raises ConfigError."""
    from orchestrator.scheduler.slurm.command_output import (
        MOST_NODES,
        TooManyNodes,
        UnreadableField,
        expand_nodes,
        fold_nodes,
    )

    single: list[str] = []
    for name in names:
        try:
            single += expand_nodes(check_field(key, "nodes", name))
            if len(single) > MOST_NODES:
                raise TooManyNodes
        except TooManyNodes as error:
            raise ConfigError(
                f"{key}={_printable(name)}: more than {MOST_NODES} nodes", where=key, hint=f"{key} takes gpu[003,017]"
            ) from error
        except UnreadableField as error:
            raise ConfigError(
                f"{key}={_printable(name)}: not a host list", where=key, hint=f"{key} takes gpu[003,017]"
            ) from error
    return fold_nodes(tuple(single)) if single else ""


def check_options(options: Mapping[str, Any], section: str = "cluster") -> dict[str, Any]:
    """Return `cluster.sbatch` as option -> True or text, without false or null options; raises ConfigError."""
    checked: dict[str, Any] = {}
    for option, value in options.items():
        name = _check_option(option, section)
        if value is None or value is False:
            continue
        key = f"{section}.sbatch.{name}"
        if value is True:
            if name in FORMS and name not in WITH_OR_WITHOUT:
                raise ConfigError(f"{key}=true: needs a value", where=key, hint=f"{key} takes {FORMS[name].example}")
            checked[name] = True
            continue
        if name in FLAGS:
            raise ConfigError(f"{key}={value}: takes no value", where=key, hint=f"{key}=true sets it")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be finite", where=key, hint=f"{key} takes {FORMS[name].example}")
        text = check_text(key, str(value) if isinstance(value, (int, float)) else value)
        if not _FREE.fullmatch(text):
            raise ConfigError(
                f"{key}={_printable(text)}: not allowed here",
                where=key,
                hint="letters, digits, spaces and _./:@+%=,;&|*()[]!^~- are",
            )
        if name in FORMS and not FORMS[name].accepts(text):
            meant = memory_meant(text) if FORMS[name] is MEMORY else time_meant(text) if name == "time-min" else ""
            hint = f"{key}={meant}" if meant else f"{key} takes {FORMS[name].example}"
            raise ConfigError(f"{key}={_printable(text)}: Slurm cannot read this", where=key, hint=hint)
        checked[name] = text
    return checked


def _check_option(option: object, section: str) -> str:
    """Return the long option name, with '-' for '_'; refuses options that orch sets itself."""
    where = f"{section}.sbatch.{_printable(str(option))}"
    if not isinstance(option, str) or not _OPTION.fullmatch(option.replace("_", "-")) or len(option) < 2:
        raise ConfigError(
            f"{where}: not an sbatch option",
            where=f"{section}.sbatch",
            hint=f"use the option's long name without dashes in front: {section}.sbatch.reservation=maint",
        )
    name = option.replace("_", "-")
    for owned, why in OWNED.items():
        # sbatch accepts any unambiguous prefix of an option
        if name == owned or (owned.startswith(name) and name not in KNOWN):
            own = why.endswith("cluster.")
            hint = f"{section}.{owned}=VALUE" if own else f"~{section}.sbatch.{name}"
            what = f"{section}.sbatch.{name}: not yours to set: {why + owned if own else why}"
            raise ConfigError(what, where=f"{section}.sbatch.{name}", hint=hint)
    near = nearest(name, KNOWN, 0.75)
    if name not in KNOWN and near:
        raise ConfigError(
            f"{section}.sbatch.{name}: no such sbatch option",
            where=f"{section}.sbatch.{name}",
            hint=f"did you mean {section}.sbatch.{near}?",
        )
    return name


KNOWN = frozenset(
    {
        "acctg-freq", "bb", "bbf", "cluster-constraint", "container", "contiguous", "core-spec", "cores-per-socket",
        "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "distribution", "exclusive", "extra", "extra-node-info",
        "gpu-bind", "gpu-freq", "gpus", "gpus-per-socket", "gres", "gres-flags", "hint", "ignore-pbs", "licenses",
        "mail-type", "mail-user", "mcs-label", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice",
        "no-kill", "nodefile", "nodelist", "overcommit", "oversubscribe", "power", "prefer", "priority", "profile",
        "propagate", "reboot", "reservation", "segment", "sockets-per-node", "spread-job", "stepmgr", "switches",
        "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind", "use-min-nodes", "wckey",
    }
)  # fmt: skip
"""sbatch options left to the user; others may come from a site's plugins."""
