"""Checks of a whole configuration beyond the types and ranges of single values. They change nothing."""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.config import keys, redaction
from orchestrator.config.layers import Assignment
from orchestrator.config.restore_tests_config import OFF, SAME, with_layout
from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.errors import ConfigError
from orchestrator.near_words import did_you_mean, nearest
from orchestrator.recovery.elastic_policy import fitting_nodes
from orchestrator.scheduler.job_environment import is_always_passed
from orchestrator.scheduler.slurm import sbatch_values
from trainer.parallel.layout import MayChange, refusal
from trainer.protocol.config import WorkloadConfig
from trainer.protocol.config_sections.fault_detection_config import BETWEEN_STAGES
from trainer.protocol.plain_data import build
from trainer.protocol.program_limits import MAX_STRING_BYTES, MAX_TOTAL_BYTES, excess_bytes, total_bytes
from trainer.protocol.secrets.run_secrets import is_name


def program_size_complaints(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield complaints about values that are too long, each with a remedy."""
    texts = {f"env.{name}:": f"{name}={value}" for name, value in config.env.items()}
    texts |= {f"command: word {place}": argument for place, argument in enumerate(config.command, 1)}
    for key, text in texts.items():
        if excess := excess_bytes(text):
            what = f"{key} is {excess} bytes longer than the {MAX_STRING_BYTES} that Linux allows"
            yield what, "put it into a file, and give the program its path"
    if (total := total_bytes(list(texts.values()))) > MAX_TOTAL_BYTES:
        what = f"command and env: have {total} bytes together, but Linux allows {MAX_TOTAL_BYTES} for a program"
        yield what, "put the longest values into files"


SHOWN = 8
"""Maximum number of node counts listed in a message."""


def elastic_complaints(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield complaints about `cluster.min_nodes`. A full layout that does not fit is reported elsewhere."""
    cluster, least = config.cluster, config.cluster.min_nodes
    if least < 0:
        yield f"cluster.min_nodes={least}: must be 0 (never fewer than cluster.nodes) or a number of nodes", ""
    elif least and config.command:
        yield (
            f"cluster.min_nodes={least}: your `command` sets its own batch size, which changes with its nodes",
            "~cluster.min_nodes; every job of a command requests all its nodes",
        )
    elif least > cluster.nodes:
        yield (
            f"cluster.min_nodes={least}: must be at most cluster.nodes={cluster.nodes}",
            f"cluster.min_nodes={max(1, cluster.nodes - 1)}",
        )
    elif 0 < least < cluster.nodes and _divides(config):
        fits = list(fitting_nodes(config))
        if not fits or fits[0] < least:
            yield _nothing_fits(config, fits)


def _divides(config: RunConfig) -> bool:
    """Return whether the full layout divides the batch size evenly. If not, another check reports that."""
    try:
        ranks = config.parallel.data_parallel_size(config.cluster.world_size)
    except ValueError:
        return False
    return config.train.batch_size % ranks == 0


def _nothing_fits(config: RunConfig, fits: list[int]) -> tuple[str, str]:
    cluster, train, least = config.cluster, config.train, config.cluster.min_nodes
    what = (
        f"cluster.min_nodes={least}: fewer nodes than cluster.nodes={cluster.nodes}, and {least} or more, "
        f"do not fit train.batch_size={train.batch_size} and `parallel`"
    )
    if fits:
        names = ", ".join(map(str, fits[:SHOWN])) + (", ..." if len(fits) > SHOWN else "")
        return f"{what}; these do: {names}", f"cluster.min_nodes={fits[0]}"
    return f"{what}; no number of nodes does", "~cluster.min_nodes"


_PROGRAM = 'pass an option to the program: command=[python, train.py, --epochs, "3"]'
_CHECKPOINTS = "the program saves its own checkpoints; checkpoints.path=FOLDER tells orch where they are"
_ONLY_FOR_WORKLOADS: dict[keys.Path, str] = {
    ("workload", "args"): _PROGRAM,
    ("parallel",): "the program creates its own mesh",
    ("model",): _PROGRAM,
    ("train",): _PROGRAM,
    ("optimizer",): _PROGRAM,
    ("validation",): _PROGRAM,
    ("checkpoint",): _CHECKPOINTS,
    ("detection", "spike"): "orch does not see the program's loss",
}
"""Sections that have no effect on a command, and what to use instead."""


def refuse_ineffective(config: RunConfig, assignments: Sequence[Assignment]) -> None:
    """Raise ConfigError for the first assignment that has no effect on a `command`.

    `assignments` are the values for this run only, not those of the site file and presets. A key that another value
    refers to (`${train.steps}`) has an effect.
    """
    if not config.command:
        return
    texts = [text for item in assignments for text in redaction.leaves(item.value) if isinstance(text, str)]
    for item in assignments:
        instead = next((what for path, what in _ONLY_FOR_WORKLOADS.items() if item.path[: len(path)] == path), "")
        key = keys.dotted_key(item.path)
        if not instead or item.clears or any(f"${{{key}}}" in text for text in texts):
            continue
        hint = f"leave it out: {instead}"
        raise ConfigError(
            f"{key}: has no effect on a `command`", where=redaction.place(item.origin) or item.origin, hint=hint
        )


BUILT_IN = WorkloadConfig().target
SECTIONS = frozenset(path[0] for path in keys.every_key() if len(path) > 1)
LARGEST = 1 << 53
"""Largest permitted whole number. Above it, doubles are not exact."""
KNOWN_TEXTS = ("python-stdlib",)
"""Entries of data.text that are names, not paths."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Origins = Mapping[tuple[str, ...], str]
Complaint = tuple[str, str]
"""The problem, beginning with the keys involved, and the remedy."""


def check(config: RunConfig, origins: Origins, source: str = "", may_change: MayChange = lambda key: True) -> None:
    """Raise ConfigError for the first invalid combination.

    The error names the file `source` if the key is not set. Hints suggest other sizes only for keys that `may_change`.
    """
    for what, hint in _complaints(config, may_change):
        raise invalid_values_error(what, origins, hint, f"not set in {source}" if source else _DEFAULTS)


_DEFAULTS = "defaults only"


def invalid_values_error(what: str, origins: Origins, hint: str = "", unset: str = _DEFAULTS) -> ConfigError:
    """Return the error for values that do not fit, with the origins of all keys that `what` names.

    If `what` ends in ": type ...", that part becomes the hint.
    """
    what, _, advice = what.partition(": type ")
    hint = hint or (f"type {advice}" if advice else "")
    named = _mentioned_keys(what)
    places = [
        f"{'.'.join(path)} from {origin}"
        for path, origin in origins.items()
        if any(path[:depth] in named for depth in range(1, len(path) + 1))
    ]
    return ConfigError(what, where="; ".join(dict.fromkeys(places)) or unset, hint=hint or _usual(what, origins))


def _mentioned_keys(what: str) -> set[tuple[str, ...]]:
    """Return the keys that a message mentions: `a.b`, its first word, and short names within those sections."""
    full = {tuple(key.split(".")) for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", what)}
    words = re.findall(r"[a-z_]+", what)
    sections = {key[0] for key in full} | set(words[:1])
    alone = {(word,) for word in words[:1] if word not in SECTIONS}
    return full | alone | {(name, word) for name in sections for word in words}


def _usual(what: str, origins: Origins) -> str:
    """Return a generic hint: omit a value that was typed; reset others with `~key`, because a preset may set them."""
    key = re.match(r"[a-z_]+(?:\.[a-z_]+)+", what)
    if key is None:
        return "`orch config show CONFIG` shows all values"
    typed = origins.get(tuple(key[0].split(".")), "").startswith("override")
    return f"leave {key[0]} out, or give another value" if typed else f"~{key[0]} restores the default"


def _complaints(config: RunConfig, may_change: MayChange) -> Iterator[Complaint]:
    yield from _unstorable(asdict(config), ())
    yield from _names(config)
    yield from _program(config)
    yield from program_size_complaints(config)
    if misfit := refusal(config, may_change):
        yield misfit.what, misfit.hint
    yield from _ranks(config)
    yield from _cluster(config)
    yield from _pauses(config)
    yield from _restore_tests(config)
    yield from elastic_complaints(config)
    if config.trains_built_in_workload:
        yield from _recompute(config)
        yield from _data(config)


def _unstorable(value: Any, path: tuple[str, ...]) -> Iterator[Complaint]:
    """Yield whole numbers too large for the registry or some JSON readers, and strings that are not UTF-8.

    Open maps may contain any number. Strings with lone surrogates come from non-UTF-8 command lines.
    """
    key = keys.dotted_key(path)
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else ((None, inner) for inner in value)
        for name, inner in items:
            below = path if name is None else (*path, name)
            yield from _unstorable(name, below)
            yield from _unstorable(inner, below)
    elif isinstance(value, int) and abs(value) > LARGEST and not keys.within_open(path):
        yield f"{key}={value}: must be between -{LARGEST} and {LARGEST} (2^53)", ""
    elif isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
        yield f"{key}={value}: is not UTF-8 text", "type it in a UTF-8 terminal (`locale` shows yours)"


def _names(config: RunConfig) -> Iterator[Complaint]:
    if not _NAME.fullmatch(config.name):
        only_begins = re.fullmatch(r"[._-][A-Za-z0-9._-]*", config.name)
        must = "begin with a letter or digit" if only_begins else "be letters, digits, '.', '_' or '-', at most 63"
        yield f"name={config.name}: must {must}", "name=my-run"
    for variable, value in config.env.items():
        if not _VARIABLE.fullmatch(variable):
            yield f"env.{variable}: is not a valid name of an environment variable", "+env.MY_VARIABLE=value"
        if "\0" in value or "\n" in value:
            yield f"env.{variable}: has a line break or a NUL in it", "put such values into a file"
    for variable in config.env_from:
        if not is_name(variable):
            yield f"env_from: {variable} is not a valid name of an environment variable", "env_from=[HF_TOKEN]"
        elif variable in config.env:
            yield f"env_from: {variable} is also in env", f"~env.{variable} leaves it to env_from"
        elif is_always_passed(variable):
            yield f"env_from: a job has its submitter's {variable} anyway", "env_from is for secrets"


def _program(config: RunConfig) -> Iterator[Complaint]:
    target = config.workload.target
    if config.command and target != BUILT_IN:
        yield (
            f"command and workload.target={target}: a run has one or the other",
            "~command runs the workload, ~workload.target runs the command",
        )
    if config.checkpoints.path and not config.command:
        yield (
            f"checkpoints.path={config.checkpoints.path}: is only for a `command`; "
            "orch knows where a workload's checkpoints are",
            "~checkpoints.path; `checkpoint.tiers` sets where orch writes its own",
        )
    if not _TARGET.fullmatch(target):
        yield f"workload.target={target}: must be package.module:Class", _target_meant(target)
    for folder in config.workload.path:
        if not Path(folder).is_dir():
            yield f"workload.path: no folder {folder}", "workload.path=[/absolute/folder]"


def _target_meant(target: str) -> str:
    """Return a hint that rewrites a file path or a dotted class as a target, or gives an example."""
    file, mark, name = target.partition(":")
    if not mark and not file.endswith(".py"):
        file, _, name = file.rpartition(".")
    module = file.removeprefix("./").removesuffix(".py").replace("/", ".")
    meant = f"{module}:{name or 'MyWorkload'}"
    return f"did you mean {meant}?" if _TARGET.fullmatch(meant) else "workload=my_pkg.my_module:MyWorkload"


_LAYOUT_KEYS = frozenset({"nodes", "min_nodes", "ranks_per_node", "spare_nodes", "kind", "root"})


def _restore_tests(config: RunConfig) -> Iterator[Complaint]:
    known = keys.section(ClusterConfig)
    for key in config.restore_tests.cluster:
        if key in _LAYOUT_KEYS:
            yield (
                f"restore_tests.cluster.{key}: a test's layout is not set here",
                "restore_tests.layouts=[2x4] is two nodes with four ranks each; a test runs where its run does",
            )
        elif key not in known:
            near = nearest(key, known)
            hint = did_you_mean(near and f"restore_tests.cluster.{near}", f"one of {', '.join(known)}")
            yield f"restore_tests.cluster.{key}: `cluster` has no such key", hint
    if config.restore_tests.command and not config.command:
        yield (
            "restore_tests.command: is only for a `command`; orch itself restores a workload's state",
            "~restore_tests.command",
        )
    if config.restore_tests.every != OFF and not config.command:
        yield from _layouts(config)


def _layouts(config: RunConfig) -> Iterator[Complaint]:
    """Yield restore test layouts that do not fit. Such tests would stay due forever and block all others."""
    data = asdict(config)
    for layout in config.restore_tests.layouts:
        if layout != SAME and (what := _misfit({**data, **with_layout(data, layout)})):
            fit = [other for other in config.restore_tests.layouts if other != layout] or [SAME]
            hint = f"set restore_tests.layouts=[{','.join(fit)}], or use other numbers of ranks"
            yield f"restore_tests.layouts: {layout}: {what}", hint


def _misfit(data: dict[str, Any]) -> str:
    """Return why the ranks of this config could not start; empty if they could."""
    try:
        found = refusal(build(RunConfig, data), may_change=lambda _: False)
    except ValueError as error:
        return str(error)
    return found.what if found else ""


def _ranks(config: RunConfig) -> Iterator[Complaint]:
    cluster = config.cluster
    if cluster.spare_nodes and cluster.nodes == 1:
        yield (
            f"cluster.spare_nodes={cluster.spare_nodes} with cluster.nodes=1: the first node leads the job, "
            f"and no spare can take its place",
            "cluster.spare_nodes=0: after losing its only node, the run continues in a new job",
        )
    world = cluster.world_size
    for event in config.drill.events:
        if not 0 <= event.rank < world:
            yield f"drill.events: rank={event.rank} is not one of the {world} ranks", f"rank: {world - 1}"
        if event.kind in BETWEEN_STAGES and config.parallel.pipeline.ranks == 1:
            yield f"drill.events: {event.kind} needs a pipeline", "parallel.pipeline.stages=2"


def _cluster(config: RunConfig) -> Iterator[Complaint]:
    """Yield a root that cannot be a folder and values that Slurm cannot parse, which would otherwise fail later."""
    if what := _no_folder(config.cluster.root):
        hint = "cluster.root=FOLDER chooses another; a missing folder is created"
        yield f"cluster.root={config.cluster.root}: {what}", hint
    for section, values in (("cluster", vars(config.cluster)), ("restore_tests.cluster", config.restore_tests.cluster)):
        for fault in sbatch_values.faults(section, values):
            yield fault.what, fault.hint


def _no_folder(place: str) -> str:
    """Return why this path cannot become a folder; empty if it is one or does not exist."""
    try:
        mode = os.stat(place).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "is a broken link" if os.path.islink(place) else ""
    except OSError:
        return ""  # the writer reports the error
    return "" if stat.S_ISDIR(mode) else "is a file, but must be a folder"


LONGEST_PAUSE = 7 * 86400
"""Maximum pause between attempts, in seconds. During a longer pause, a run would seem to have no controller."""


def _pauses(config: RunConfig) -> Iterator[Complaint]:
    for name in ("backoff", "backoff_max"):
        if (seconds := getattr(config.recovery, name)) > LONGEST_PAUSE:
            yield (
                f"recovery.{name}={seconds:g}: must be at most {LONGEST_PAUSE} seconds (a week)",
                f"~recovery.{name} restores the default",
            )


def _recompute(config: RunConfig) -> Iterator[Complaint]:
    """Refuse a combination that torch 2.13 cannot run.

    If FSDP gathers parts of a layer whose matrix products are kept, the first backward pass fails.
    """
    train, wrap = config.train, config.parallel.fsdp.wrap
    if train.activation_checkpointing and train.recompute.keep == "products" and wrap not in ("auto", "Block"):
        yield (
            f"train.recompute.keep=products needs whole layers, but parallel.fsdp.wrap={wrap} wraps other modules",
            "set parallel.fsdp.wrap=auto or train.recompute.keep=nothing",
        )


def _data(config: RunConfig) -> Iterator[Complaint]:
    data = config.data
    if data.path and data.text:
        yield (
            f"data.path={data.path} and data.text: only one may be set",
            "add '~data.text' to train on data.path, or '~data.path' to train on data.text",
        )
    if not data.path and not data.text:
        yield "data.text and data.path: no training data is given", "data.text=[python-stdlib]"
    for source in data.text:
        if source not in KNOWN_TEXTS and "://" not in source and not Path(source).exists():
            yield f"data.text: no such file or folder {source}", f"names that need no file: {', '.join(KNOWN_TEXTS)}"
    if data.path and re.search(r"/[a-z][a-z0-9]+:/", data.path):
        yield f"data.path={data.path}: is a URL; ranks read a folder that every node sees", "data.path=/shared/tokens"
    elif data.path and Path(data.path).exists() and not Path(data.path).is_dir():
        yield f"data.path={data.path}: is a file, but must be a folder", "orch data prepare YOUR-TEXTS --out FOLDER"
    elif data.path and not Path(data.path).is_dir():
        yield f"data.path={data.path}: no such folder", f"orch data prepare YOUR-TEXTS --out {data.path}"
