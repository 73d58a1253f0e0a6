"""`orch doctor`: checks of this machine and of Slurm."""

import os
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from checkpointing.storage.trusted_path import weakness
from orchestrator.cli.cluster import crontab
from orchestrator.cli.cluster.account_use import account_use, budget_use
from orchestrator.cli.cluster.check import FAIL, INFO, OK, WARN, Check, CommandRunner
from orchestrator.cli.cluster.site_settings import (
    association_limits,
    parse_config,
    partition_limits,
    read_version,
    site_settings,
)
from orchestrator.cli.terminal.argument_types import NonEmptyPath, Seconds
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, size
from orchestrator.config.budgets_config import BudgetConfig
from orchestrator.config.compose import compose
from orchestrator.errors import OrchError, Precondition, RegistryError, SlurmUnreachable
from orchestrator.home import registry_path, state_home
from orchestrator.registry import file_systems, versions
from orchestrator.scheduler.available_schedulers import kinds, resolve
from orchestrator.scheduler.container_check import container_problems
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.command_output import require_configuration, run_command, unreachable
from orchestrator.scheduler.slurm.node_capacity import (
    NODES,
    PARTITIONS,
    asked_words,
    partitions_here,
    read_nodes,
    shortfall,
)
from orchestrator.submission.create_run import first_job
from trainer.protocol.config_sections.scheduler_kinds import AUTO, SLURM, traits
from trainer.protocol.required_packages import NEEDED_BY_RANKS, find_unmet

NEEDED = {
    **NEEDED_BY_RANKS, "click": "8.2.1", "sqlalchemy": "2.0", "omegaconf": "2.3.1", "submitit": "1.5.3", "fsspec": "",
    "setproctitle": "", "jinja2": "", "ClusterShell": "", "rich": "",
}  # fmt: skip
_LITTLE = 5 * 1024**3
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
ANSWER_WITHIN = 10.0
FIRST_RUN = "slurm-first-run"
"""Preset for a new user's first run."""
MARKS = {OK: "ok  ", INFO: "note", WARN: "warn", FAIL: "FAIL"}


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Check("python", FAIL, f"Python {text} is too old", "use Python 3.11 or newer")
    return Check("python", OK, f"Python {text}")


def packages() -> Iterator[Check]:
    """Check the installed versions in the package metadata, without importing the packages."""
    unmet = dict(find_unmet(NEEDED))
    for name, version in unmet.items():
        if version:
            least = NEEDED[name]
            yield Check(name, FAIL, f"{name} {version} is older than {least}", f"pip install '{name}>={least}'")
    if missing := [name for name, version in unmet.items() if not version]:
        yield Check("packages", FAIL, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    if "torch" not in missing:
        yield Check("torch", OK, f"torch {metadata.version('torch')}")


def compiler(headers: Path | None = None) -> Check:
    """Check for the requirements of `train.compile` on nodes: a C++ compiler and the headers of this Python."""
    word = os.environ.get("CXX", "g++")
    file = (headers or Path(sysconfig.get_path("include"))) / "Python.h"
    if shutil.which(word) is None:
        missing, packages = word, "apt-get install g++, dnf install gcc-c++"
    elif not file.exists():
        missing, packages = str(file), "apt-get install python3-dev, dnf install python3-devel"
    else:
        return Check("compiler", OK, f"{word} and Python.h, for train.compile")
    text = f"train.compile=true would fail here: there is no {missing}"
    return Check("compiler", INFO, text, f"install it on the nodes: {packages}")


def state_folder() -> Check:
    """Check that `ORCH_HOME` can be written to, or created."""
    hint = "set ORCH_HOME to a folder that you may write to"
    try:
        home = state_home()
    except OSError as error:
        return Check("state", FAIL, f"{error.filename}: {error.strerror}", hint)
    there, trouble = _probe(home)
    if trouble:
        what = "written to" if there == home else f"created in {there}"
        return Check("state", FAIL, f"state folder {home} cannot be {what}: {trouble}", hint)
    if there != home:
        return Check("state", OK, f"state folder {home}; it will be created")
    if home.stat().st_mode & 0o077:
        return Check("state", WARN, f"{home} is open to others", f"chmod 700 {home}")
    return Check("state", OK, f"state folder {home}")


def registry(path: Path) -> Iterator[Check]:
    """Check the registry's file system, the journal mode that is safe there, and its version."""
    try:
        place = _nearest(path.absolute().parent) / path.name
        mount = file_systems.find_mount(place.parent)
        journal = file_systems.choose_journal_mode(place, mount)
        version = versions.read_version(path)
        versions.require_known(version, path)
    except RegistryError as error:
        yield Check("registry", FAIL, error.what, error.hint)
        return
    except OSError as error:
        yield Check("registry", FAIL, f"{path}: {error.strerror}", "set ORCH_REGISTRY to a file on a local disk")
        return
    kind = mount.kind if mount else "unknown"
    what = "not created yet" if version is None else f"version {version}"
    if journal == "wal":
        yield Check("registry", OK, f"registry {path} ({kind}, {what}, write-ahead log)")
    else:
        text = f"registry {path} is on {kind} ({what}), which all hosts share: the slower rollback journal is used"
        yield Check("registry", WARN, text, "a local disk is faster: ORCH_REGISTRY=/local/disk/registry.db")


def run_folder(root: Path | None) -> Iterator[Check]:
    """Check that the folder of all runs is writable, supports rename, and has free space."""
    if root is None:
        yield Check("root", INFO, "no folder for runs was checked", "orch doctor --root FOLDER")
        return
    there, trouble = _probe(root)
    if trouble:
        hint = "choose a folder that you may write to: cluster.root=FOLDER"
        yield Check("root", FAIL, f"run folder {root} cannot be written to: {trouble} ({there})", hint)
        return
    disk, inodes, mount = shutil.disk_usage(there), os.statvfs(there), file_systems.find_mount(there)
    text = f"run folder {root} ({mount.kind if mount else 'unknown file system'}, {size(disk.free)} free)"
    yield Check("root", OK, text if there == root else f"{text}; it will be created")
    if weak := weakness(there):
        hint = weak.closing() or "cluster.shared_root=true uses it anyway, or cluster.root=FOLDER names another"
        yield Check("root", WARN, f"`orch submit` refuses this folder: {weak}", hint)
    if disk.free < _LITTLE:
        hint = "free some space, or set cluster.root=FOLDER on another disk"
        yield Check("root", WARN, f"only {size(disk.free)} free for checkpoints", hint)
    if inodes.f_files and inodes.f_ffree < inodes.f_files * 0.02:
        hint = "remove small files, or set checkpoint.files=node, which writes fewer"
        yield Check("root", WARN, f"only {inodes.f_ffree} of {inodes.f_files} inodes are free", hint)


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest ancestor that exists."""
    path = path.expanduser().absolute()
    while not os.path.exists(path):  # an inaccessible path counts as missing
        path = path.parent
    return path


def _probe(folder: Path) -> tuple[Path, str]:
    """Try what every commit does in a folder: write, fsync, rename, read under the new name.

    Returns the nearest existing folder, in which this was tried, and the error, if any.
    """
    there = _nearest(folder)
    first = there / f".orch-probe-{secrets.token_hex(6)}"
    second = first.with_name(first.name + "-renamed")
    try:
        with first.open("xb") as stream:
            stream.write(b"probe")
            stream.flush()
            os.fsync(stream.fileno())
        first.rename(second)
        return there, "" if second.read_bytes() == b"probe" else "a renamed file does not hold what was written"
    except OSError as error:
        return there, "is not a folder" if isinstance(error, NotADirectoryError) else error.strerror or str(error)
    finally:
        for path in (first, second):
            with suppress(OSError):
                path.unlink()


def ask_slurm(command: list[str]) -> str:
    """Return the output of a Slurm command. Raises OrchError if it fails or does not answer."""
    done = run_command(command, ANSWER_WITHIN)
    if done.returncode:
        raise unreachable(command[0], done.stderr)
    return done.stdout


def slurm(
    root: Path | None, *, wanted: bool, jobs: Mapping[str, Resources], ask: CommandRunner = ask_slurm
) -> Iterator[Check]:
    """Check Slurm: its commands, whether it answers, and its accounting, configuration and nodes.

    `wanted`: whether the configuration names Slurm. `jobs`: node requirements by configuration name.
    """
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if len(missing) == len(COMMANDS):
        level, hint = (FAIL, "work on a login node, or use cluster.kind=local") if wanted else (INFO, "")
        yield Check("slurm", level, "no Slurm on this machine: runs go to simulated nodes here (local)", hint)
        return
    if missing:
        yield Check("slurm", FAIL, f"Slurm is installed without {', '.join(missing)}", "put Slurm's bin folder on PATH")
        return
    try:
        require_configuration(os.environ)
    except SlurmUnreachable as error:
        yield Check("slurm", FAIL, error.what, error.hint)
        return
    try:
        version, settings = ask(["sbatch", "--version"]).strip(), parse_config(ask(["scontrol", "show", "config"]))
    except OrchError as error:
        level = FAIL if wanted else WARN
        yield Check("slurm", level, error.what, f"{error.hint}; meanwhile runs can be local")
        return
    name = settings.get("ClusterName", "?")
    yield Check("slurm", OK, f"{version}, cluster {name}")
    yield accounting(settings, ask)
    yield from site_settings(settings, read_version(version))
    yield from association_limits(settings, ask)
    if settings.get("PriorityType", "").endswith("multifactor"):
        yield from account_use(ask)
    for source, asked in jobs.items():
        yield demand(source, asked, ask, wanted=wanted)
        yield from partition_limits(source, asked, ask)
    mount = file_systems.find_mount(_nearest(root)) if root is not None else None
    if mount is not None and mount.is_local:
        text = f"{root} is on a file system local to this host; compute nodes may not see it"
        hint = "set cluster.root=FOLDER on the shared file system; `orch doctor --root FOLDER` checks it"
        yield Check("root", WARN, text, hint)


def accounting(settings: Mapping[str, str], ask: CommandRunner) -> Check:
    """Check whether `sacct` reports jobs that have ended."""
    without = "the queue, heartbeats and outcome files decide; node failures are detected late or not at all"
    if settings.get("AccountingStorageType", "").endswith("none") or shutil.which("sacct") is None:
        return Check("accounting", WARN, f"no accounting here: {without}")
    try:
        ask(["sacct", "-X", "-n", "-S", "now-1hours"])
    except OrchError as error:
        return Check("accounting", WARN, f"{error.what}: {without}", "ask your site whether slurmdbd runs")
    return Check("accounting", OK, "sacct answers")


def demand(source: str, asked: Resources, ask: CommandRunner, *, wanted: bool) -> Check:
    """Check whether the nodes that Slurm reports meet a configuration's requirements."""
    try:
        partitions, nodes = partitions_here(ask(list(PARTITIONS))), read_nodes(ask(list(NODES)))
    except OrchError as error:
        return Check("nodes", WARN, f"cannot check whether nodes have what {source} requests: {error.what}")
    default = next((name for name, is_default in partitions.items() if is_default), "")
    missing = [name for name in filter(None, asked.partition.split(",")) if name not in partitions]
    if missing or not (asked.partition or default):
        which = f"partition {missing[0]}, which does not exist" if missing else "no partition, and Slurm has no default"
        change = f"cluster.partition={default or next(iter(partitions), 'NAME')}"
        text = f"{source} names {which}; available: {', '.join(partitions)}"
    elif (short := shortfall(asked, nodes)) is not None:
        text, change = f"{source} requests more than nodes have: {short.words}", short.change
    else:
        where = asked.partition or default
        return Check("nodes", OK, f"partition {where} has what {source} requests: {asked_words(asked)}")
    hint = f"`orch submit {source} {change}`, or write that into ~/.config/orch/config.yaml" if change else "sinfo -Nel"
    return Check("nodes", FAIL if wanted else WARN, text, hint)


def periodic_passes() -> Check:
    """Check whether cron or scrontab keeps runs going after a reboot of this host."""
    ways = []
    for via in ("cron", "scrontab"):
        try:
            table = crontab.read(via)
        except OrchError:
            continue
        if any(line.startswith(crontab.MARK) for line in table):
            return Check("controller", OK, f"{via} runs a controller's pass regularly")
        ways.append(via)
    if not ways:
        text = "neither cron nor scrontab works: after a reboot of this host runs wait for your next `orch` command"
        return Check("controller", WARN, text)
    text = "after a reboot of this host no controller runs until you type an `orch` command"
    return Check("controller", INFO, text, f"orch controller install --via {ways[0]}")


@click.command(cls=Verb)
@click.option("--root", type=NonEmptyPath(path_type=Path), default=None, help="Folder for runs; default: cluster.root.")
@click.option("--config", "source", default="tiny-gpt", show_default=True, help="Configuration to take cluster.* from.")
@click.option(
    "--nodes", type=click.IntRange(1), metavar="N",
    help="Instead, measure the network and the storage with a short job on N nodes.",
)  # fmt: skip
@click.option(
    "--step-seconds", type=Seconds(min=0, min_open=True), metavar="SECONDS",
    help="With --nodes: the time of a training step, with which the measured times are compared.",
)  # fmt: skip
@click.pass_obj
def doctor(screen: Screen, root: Path | None, source: str, nodes: int | None, step_seconds: float | None) -> int:
    """Check this machine and cluster, and list what to fix.

    It checks packages, folders, the registry, Slurm's commands and nodes, container images, what restarts a
    controller, your fair share, limits and budgets with their use, and what the site's Slurm settings enable or
    prevent, with the key and the value to set. It changes nothing. The exit code is 4 if something must be fixed
    before runs can continue.

    With --nodes it submits a short run with the tag `probe` instead. It measures collectives by message size, within
    and between nodes, and the rates of `data.path`, the run root and the checkpoint tiers (docs/waiting.md).
    """
    if nodes is not None:
        from orchestrator.cli.cluster.probe import probe_cluster  # imports the modules of `orch submit`

        measured = probe_cluster(screen, source, nodes, step_seconds=step_seconds)
        if screen.json:
            screen.data("doctor", {"ok": True, "checks": [], "probe": measured})
        return 0
    found: list[Check] = []
    cluster = _cluster(source, found)
    place = root or (Path(cluster["root"]) if cluster.get("root") else None)
    place = place.expanduser() if place else None
    home = state_folder()
    found += [python(), *packages(), compiler(), home]
    found += registry(registry_path()) if home.level != FAIL else ()
    found += budget_use(registry_path(), _budgets(source)) if home.level != FAIL else ()
    found += run_folder(place)
    wanted = cluster.get("kind") == SLURM
    found += slurm(place, wanted=wanted, jobs=_jobs(source if wanted else FIRST_RUN))
    found += containers(cluster)
    found.append(periodic_passes())
    failed = [check for check in found if check.level == FAIL]
    if screen.json:
        screen.data("doctor", {"ok": not failed, "checks": [check.__dict__ for check in found]})
    else:
        _show(screen, found)
    return Precondition.exit_code if failed else 0


def containers(cluster: Mapping[str, Any]) -> Iterator[Check]:
    """Check what the configuration's container templates need, as far as this machine shows it."""

    def srun_help() -> str:
        return run_command(["srun", "--help"], ANSWER_WITHIN).stdout if shutil.which("srun") else ""

    args = {name: str(value) for name, value in (cluster.get("template_args") or {}).items()}
    with suppress(OrchError):  # `slurm` reports commands that do not answer; `_cluster` an unknown kind
        here = traits(resolve(str(cluster.get("kind") or AUTO))).simulated_nodes
        for problem, hint in container_problems(cluster.get("templates") or (), args, srun_help, here=here):
            yield Check("container", WARN, problem, hint)


def _cluster(source: str, found: list[Check]) -> dict[str, Any]:
    """Return the `cluster` section of the user's configuration; its errors become findings."""
    try:
        cluster: dict[str, Any] = compose(source, (), environ=os.environ).data["cluster"]
    except OrchError as error:
        found.append(Check("config", FAIL, error.what, error.hint or error.where))
        return {}
    return cluster


def _budgets(source: str) -> tuple[BudgetConfig, ...]:
    try:
        return compose(source, (), environ=os.environ).config.budgets
    except OrchError:  # reported by `_cluster`
        return ()


def _jobs(source: str) -> dict[str, Resources]:
    """Return this configuration's job resources, keyed by its name; empty if Slurm is not available here."""
    if SLURM not in kinds():
        return {}
    try:
        return {source: first_job(compose(source, (), environ=os.environ).config, SLURM).resources}
    except OrchError:  # reported by `_cluster` if it is the requested configuration
        return {}


def _show(screen: Screen, found: list[Check]) -> None:
    for check in found:
        screen.say(f"{MARKS[check.level]}  {check.text}", hang=6)
        if check.hint and check.level != OK:
            screen.say(f"      -> {check.hint}", hang=3)
    count = {level: sum(1 for check in found if check.level == level) for level in MARKS}
    screen.note(f"{count[OK]} ok, {count[WARN]} warnings, {count[FAIL]} failures")
