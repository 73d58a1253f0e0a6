"""Allowed values for sbatch options. Pure.

Even a quoted newline ends the comment line of an sbatch script, and the next line would run as a command. So control
characters are refused everywhere, and each field accepts only Slurm's grammar for it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.near_words import nearest
from orchestrator.scheduler.slurm.command_output import (
    MOST_NODES,
    TooManyNodes,
    UnreadableField,
    expand_nodes,
    fold_nodes,
)
from trainer.protocol import time_spans


@dataclass(frozen=True)
class ValueFormat:
    """Value pattern, and an example for messages."""

    pattern: str
    example: str

    def accepts(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value, re.ASCII) is not None


MEMORY = ValueFormat(r"[0-9]+([KMGTkmgt][Bb]?)?", "a whole number with K, M, G or T: 64G")
HOSTS = ValueFormat(r"[A-Za-z0-9_.\[][A-Za-z0-9_.,\[\]-]*", "a host list: gpu[003,017]")
FORMS: dict[str, ValueFormat] = {
    **dict.fromkeys(("mem-per-cpu", "mem-per-gpu", "tmp"), MEMORY),
    "time-min": ValueFormat(r"(?:\d+-)?\d+(?::\d+){0,2}", "minutes, H:MM:SS or D-HH:MM:SS: 2-00:00:00"),
    "nodelist": HOSTS,
}
"""Value formats for some options; Slurm checks the other options."""

FLAGS = frozenset({"contiguous", "ignore-pbs", "overcommit", "reboot", "spread-job", "stepmgr", "use-min-nodes"})
"""Options without a value, set by `true`."""


_NAME = r"[A-Za-z0-9_.@+][A-Za-z0-9_.@+:-]*"
_FIELDS = {
    "name": ValueFormat(r"[A-Za-z0-9_.][A-Za-z0-9_.+-]{0,199}", "letters, digits, '.', '_', '-'"),
    "comment": ValueFormat(r"[A-Za-z0-9_./:][A-Za-z0-9_./:@+-]{0,255}", "letters, digits and ./:_-"),
    "partition": ValueFormat(rf"{_NAME}(,{_NAME})*", "a partition name, or several with commas: gpu,gpu-long"),
    "account": ValueFormat(_NAME, "an account name"),
    "qos": ValueFormat(_NAME, "a QOS name"),
    "constraint": ValueFormat(r"[A-Za-z0-9_.\[(][A-Za-z0-9_.,&|*()\[\]:+-]*", "node features: h100&ib"),
    "mem": MEMORY,
    "nodes": HOSTS,
}
_FREE = re.compile(r"[A-Za-z0-9_./:@+%=\[(][A-Za-z0-9_./:@+%=,;&|*()\[\]!^~ -]*", re.ASCII)
_OPTION = re.compile(r"[a-z][a-z]*(-[a-z]+)*", re.ASCII)
_BY_KEY = "it has its own key: cluster."
OWNED = {
    option: why
    for why, options in {
        _BY_KEY: "partition account qos constraint exclude mem time",
        "set cluster.nodes": "nodes",
        "set cluster.cpus_per_task": "cpus-per-task",
        "set cluster.gpus_per_node": "gpus-per-node",
        "set cluster.signal_lead: the agents wait for USR2": "signal",
        "orch finds its jobs by their name": "job-name",
        "orch marks its jobs by their comment": "comment",
        "orch submits every job held and releases it itself": "hold",
        "orch starts new attempts itself, on different nodes if necessary": "requeue",
        "orch sets it itself": "no-requeue",
        "one run is one job": "array",
        "orch decides when an attempt starts; to order runs: `orch wait RUN && orch submit ...`": "dependency",
        "a held job is released by orch": "begin",
        "a job's variables come from `env`": "export export-file get-user-env",
        "the job's script is orch's": "wrap input",
        "jobs start in their run directory": "chdir",
        "orch reads sbatch's answer": "parsable quiet verbose",
        "use `orch submit --dry-run`": "test-only",
        "use `orch submit --wait`": "wait",
        "the agents wait for each other": "wait-all-nodes",
        "orch uses no dependencies": "kill-on-invalid-dep",
        "logs are in the run directory": "output error",
        "logs are appended to": "open-mode",
        "look-ups query one cluster: set SLURM_CONF or SLURM_CLUSTERS": "clusters",
        "jobs are yours": "uid gid",
        "the job's script may run on any of its nodes": "batch",
        "see man sbatch": "help usage",
        "use `orch doctor`": "version",
        "one agent per node starts all ranks": (
            "ntasks ntasks-per-node ntasks-per-core ntasks-per-gpu ntasks-per-socket gpus-per-task tres-per-task"
        ),
    }.items()
    for option in options.split()
}
"""Options that `cluster.sbatch` cannot set, each with the reason or the alternative."""


def _refusal(key: str, value: object, why: str, hint: str) -> ConfigError:
    text = value if isinstance(value, str) else str(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return ConfigError(f"{key}={shown!r}: {why}", where=key, hint=hint)


def _plain(key: str, value: object) -> str:
    """Return the value as text on one line. Raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{key}={value!r}: must be text", where=key, hint=f"put it in quotes: {key}='...'")
    if not value.isprintable():
        hint = f"write {key} on one line, in plain characters"
        raise _refusal(key, value, "newlines and control characters are refused", hint)
    return value


def check_text(key: str, value: object) -> str:
    """Return the value as text. Raises ConfigError for control characters, and for a leading dash."""
    text = _plain(key, value)
    if text.startswith("-"):
        raise _refusal(key, text, "must not begin with '-'", "sbatch would read it as another option")
    return text


def _check_format(key: str, text: str, form: ValueFormat) -> str:
    if not form.accepts(text):
        raise _refusal(key, text, "Slurm cannot read this", f"{key} takes {form.example}")
    return text


def check_field(key: str, value: object, field: str) -> str:
    """Return a valid value of a known field (see `_FIELDS`). Raises a ConfigError that names `key` and the remedy."""
    return _check_format(key, _plain(key, value), _FIELDS[field])


def minutes(key: str, value: object) -> int:
    """Return a time limit in Slurm's notation in whole minutes, rounded up as in Slurm. Raises ConfigError."""
    text = str(value)
    hint = f"{key} takes minutes, H:MM:SS or D-HH:MM:SS: {key}=2-00:00:00"
    try:
        seconds = time_spans.seconds(text)
    except ValueError as error:
        raise _refusal(key, text, "Slurm cannot read this as a time limit", hint) from error
    if seconds <= 0:
        raise _refusal(key, text, "must be greater than zero", hint)
    return math.ceil(seconds / 60)


def check_nodes(key: str, names: tuple[str, ...]) -> str:
    """Return one host list that combines these names and host lists, or "" without any. Raises ConfigError."""
    single: list[str] = []
    for name in names:
        try:
            single += expand_nodes(check_field(key, name, "nodes"))
            if len(single) > MOST_NODES:
                raise TooManyNodes
        except UnreadableField as error:
            why = f"more than {MOST_NODES} nodes" if isinstance(error, TooManyNodes) else "not a host list"
            raise _refusal(key, name, why, f"{key} takes gpu[003,017]") from error
    return fold_nodes(tuple(single)) if single else ""


def check_options(options: Mapping[str, Any], section: str = "cluster") -> dict[str, Any]:
    """Return `cluster.sbatch` as {option: True or text}, without false or null options. Raises ConfigError."""
    checked: dict[str, Any] = {}
    for option, value in options.items():
        name = _check_option(option, section)
        if value is not None and value is not False:
            checked[name] = _check_option_value(f"{section}.sbatch.{name}", name, value)
    return checked


def _check_option_value(key: str, name: str, value: object) -> object:
    form = FORMS.get(name)
    if value is True:
        if form is not None:
            raise ConfigError(f"{key}=true: needs a value", where=key, hint=f"{key} takes {form.example}")
        return True
    if name in FLAGS:
        raise ConfigError(f"{key}={value}: takes no value", where=key, hint=f"{key}=true sets it")
    text = check_text(key, str(value) if isinstance(value, (int, float)) else value)
    if not _FREE.fullmatch(text):
        raise _refusal(key, text, "not allowed here", "letters, digits, spaces and _./:@+%=,;&|*()[]!^~- are")
    return text if form is None else _check_format(key, text, form)


def container_template(option: str) -> tuple[str, str, str] | None:
    """Return the template, argument and value that replace this option of a container plugin, or None."""
    if option in ("container", "environment"):
        return ("oci", "bundle", "PATH") if option == "container" else ("edf", "environment", "NAME")
    flag = option.removeprefix("no-")
    if not flag.startswith("container-"):
        return None
    argument = flag.removeprefix("container-").replace("-", "_")
    if argument == "readonly":
        return "pyxis", "writable", "false"
    switch = argument in ("mount_home", "remap_root", "writable", "entrypoint")
    return "pyxis", argument, ("false" if flag != option else "true") if switch else "VALUE"


def _check_option(option: object, section: str) -> str:
    """Return the long option name, with '-' for '_'; refuses options that orch sets itself."""
    name = option.replace("_", "-") if isinstance(option, str) else ""
    key = f"{section}.sbatch.{name}"
    if not _OPTION.fullmatch(name) or len(name) < 2:
        hint = f"use the option's long name without dashes in front: {section}.sbatch.reservation=maint"
        what = f"{section}.sbatch.{str(option)[:60]!r} is not an sbatch option"
        raise ConfigError(what, where=f"{section}.sbatch", hint=hint)
    for owned, why in OWNED.items():
        # sbatch accepts any unambiguous prefix of an option
        if name == owned or (owned.startswith(name) and name not in KNOWN):
            own = why is _BY_KEY
            hint = f"{section}.{owned}=VALUE" if own else f"~{key}"
            raise ConfigError(f"{key}: cannot be set here: {why + owned if own else why}", where=key, hint=hint)
    if (instead := container_template(name)) is not None:
        template, argument, value = instead
        what = f"{key}: the whole script would run in the container; a template runs only the agents there"
        hint = f"{section}.templates=[default,{template}] +{section}.template_args.{argument}={value}"
        raise ConfigError(what, where=key, hint=hint)
    near = nearest(name, KNOWN, 0.75)
    if name not in KNOWN and near:
        raise ConfigError(f"{key}: no such sbatch option", where=key, hint=f"did you mean {section}.sbatch.{near}?")
    return name


KNOWN = frozenset(
    {
        "acctg-freq", "bb", "bbf", "cluster-constraint", "contiguous", "core-spec", "cores-per-socket",
        "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "distribution", "exclusive", "extra", "extra-node-info",
        "gpu-bind", "gpu-freq", "gpus", "gpus-per-socket", "gres", "gres-flags", "hint", "ignore-pbs", "licenses",
        "mail-type", "mail-user", "mcs-label", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice",
        "no-kill", "nodefile", "nodelist", "overcommit", "oversubscribe", "power", "prefer", "priority", "profile",
        "propagate", "reboot", "reservation", "segment", "sockets-per-node", "spread-job", "stepmgr", "switches",
        "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind", "use-min-nodes", "wckey",
    }
)  # fmt: skip
"""sbatch options left to the user; others may come from a site's plugins."""

PER_NODE, GRES_GPU = "per-node", "gres"
"""Values of `cluster.gpus`."""
_GPU = re.compile(r"(?:^|,)(?:gres[/:])?gpu(?![\w-])")


def names_gpus(gres: str) -> bool:
    """Return whether a value of `--gres` requests GPUs."""
    return _GPU.search(gres) is not None


LONGEST_LEAD = 65535  # maximum seconds before a job's end at which Slurm can signal it
_SIZES = ("mem", "mem-per-cpu", "mem-per-gpu")


def faults(section: str, values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield errors for values that a job script cannot contain; `section` is the prefix of the keys (`cluster`).

    Keys missing from `values` are not checked.
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
        _check_gres(section, values, str(options.get("gres", "")))
        _check_segments(section, values, str(options.get("segment", "")))
    except ConfigError as error:
        yield error
        return
    asked = [name for name in _SIZES if name in options or (name == "mem" and values.get("mem"))]
    if len(asked) > 1:
        keys = [f"{section}.mem" if name == "mem" else f"{section}.sbatch.{name}" for name in asked]
        hint = " or ".join(f"~{key}" for key in keys)
        yield ConfigError(f"{' and '.join(keys)}: Slurm accepts only one of them", where=keys[0], hint=hint)


def _check_segments(section: str, values: Mapping[str, Any], segment: str) -> None:
    """Refuse a number of nodes that does not fill its segments, which Slurm would never start."""
    size, spares = int(segment) if segment.isdecimal() else 0, int(values.get("spare_nodes") or 0)
    asked = int(values.get("nodes") or 0) + spares
    if size and asked > size and asked % size:
        missing = size - asked % size
        why = f"{asked} nodes ({section}.nodes + {section}.spare_nodes) do not fill segments of {size}"
        hint = f"{section}.spare_nodes={spares + missing} fills them: each segment needs spares of its own"
        raise _refusal(f"{section}.sbatch.segment", segment, why, hint)


def _check_gres(section: str, values: Mapping[str, Any], gres: str) -> None:
    """Refuse a second request for GPUs, which Slurm 26.05 refuses, too."""
    if values.get("gpus_per_node") and values.get("gpus", PER_NODE) == PER_NODE and names_gpus(gres):
        key = f"{section}.sbatch.gres"
        why = f"{section}.gpus_per_node={values['gpus_per_node']} also requests GPUs, as --gpus-per-node"
        raise _refusal(key, gres, why, f"{section}.gpus=gres requests them by --gres only, or ~{key}")


_FEWEST_MEGABYTES = 1024  # below this, memory without a unit was probably meant in GB, not Slurm's MB
_MOST_MINUTES = 1440  # above this, a time without a unit was probably meant in seconds, not Slurm's minutes


def _check_unit(key: str, name: str, value: object) -> None:
    """Refuse a bare number if Slurm's unit probably differs from the intended unit."""
    text = str(value)
    number = int(text) if re.fullmatch(r"\d+", text, re.ASCII) else 0
    if name in (*_SIZES, "tmp") and 0 < number < _FEWEST_MEGABYTES:
        unit, hint = "MB", f"{key}={number}G, or {key}={number}M"
    elif name in ("time", "time-min") and number > _MOST_MINUTES:
        unit, hint = "minutes", f"write D-HH:MM:SS or H:MM:SS: {key}=2-00:00:00"
    else:
        return
    raise ConfigError(f"{key}={text}: Slurm reads this as {number} {unit}", where=key, hint=hint)


def _lead(key: str, value: object) -> None:
    if not isinstance(value, int) or not 0 <= value <= LONGEST_LEAD:
        hint = f"{key}=120 means two minutes"
        raise ConfigError(f"{key}={value}: must be from 0 to {LONGEST_LEAD} seconds", where=key, hint=hint)


def _gpus(key: str, value: object) -> None:
    if value not in (PER_NODE, GRES_GPU):
        raise _refusal(key, value, "no such option", f"{key} takes {PER_NODE} or {GRES_GPU}")


def _hosts(key: str, value: object) -> None:
    check_nodes(key, (check_text(key, value),))


_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    **{name: partial(check_field, field=name) for name in ("partition", "account", "qos", "constraint", "mem")},
    "exclude": _hosts,
    "time": minutes,
    "signal_lead": _lead,
    "gpus": _gpus,
    "interface": check_text,
    "python": check_text,
}
"""Check for each key's value."""
