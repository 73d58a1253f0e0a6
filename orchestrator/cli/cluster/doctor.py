"""`orch doctor`, with its checks of Slurm."""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.cluster.machine_checks import FAIL, INFO, OK, WARN, Check, is_local, machine
from orchestrator.cli.terminal.argument_types import NonEmptyPath
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import OrchError, Precondition
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.node_capacity import (
    NODES,
    PARTITIONS,
    asked_words,
    partitions_here,
    read_nodes,
    shortfall,
)
from trainer.protocol.config_sections.scheduler_kinds import SLURM

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
ANSWER_WITHIN = 10.0
CommandRunner = Callable[[list[str]], str]
"""Runs a Slurm command and returns its output; raises OrchError."""


def ask_slurm(command: list[str]) -> str:
    """Return the output of a Slurm command. Raises OrchError if it fails or does not answer."""
    from orchestrator.scheduler.slurm.command_output import run_command, unreachable

    done = run_command(command, ANSWER_WITHIN)
    if done.returncode:
        raise unreachable(command[0], done.stderr)
    return done.stdout


def slurm(
    root: Path | None, *, wanted: bool, jobs: Mapping[str, Resources], ask: CommandRunner = ask_slurm
) -> Iterator[Check]:
    """Check Slurm's commands, answer, accounting, configuration and nodes.

    `wanted`: the configuration names Slurm. `jobs`: node requirements of configurations, by name.
    """
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if len(missing) == len(COMMANDS):
        level, hint = (FAIL, "work on a login node, or use cluster.kind=local") if wanted else (INFO, "")
        yield Check("slurm", level, "no Slurm on this machine: runs go to simulated nodes here (local)", hint)
        return
    if missing:
        yield Check("slurm", FAIL, f"Slurm is here without {', '.join(missing)}", "put Slurm's bin folder on PATH")
        return
    if (named := os.environ.get("SLURM_CONF")) and not os.path.isfile(named):
        hint = "unset SLURM_CONF, or name the file with Slurm's configuration"
        yield Check("slurm", FAIL, f"SLURM_CONF={named}: no such file, so no Slurm command works", hint)
        return
    try:
        version, settings = ask(["sbatch", "--version"]).strip(), parse_config(ask(["scontrol", "show", "config"]))
    except OrchError as error:
        level = FAIL if wanted else WARN
        yield Check("slurm", level, error.what, "`scontrol ping` shows when it answers; meanwhile runs can be local")
        return
    name = settings.get("ClusterName", "?")
    yield Check("slurm", OK, f"{version}, cluster {name}")
    yield accounting(settings, ask)
    yield from promises(settings)
    for source, asked in jobs.items():
        yield demand(source, asked, ask, wanted=wanted)
    if root is not None and is_local(root):
        text = f"{root} is on a file system of this host alone; compute nodes may not see it"
        yield Check(
            "root",
            WARN,
            text,
            "cluster.root=FOLDER on the shared file system; `orch doctor --root FOLDER` looks at one",
        )


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`: one `Name = value` line each."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def accounting(settings: Mapping[str, str], ask: CommandRunner) -> Check:
    """Check whether `sacct` reports ended jobs."""
    without = "the queue, heartbeats and outcome files decide; node failures are detected late or not at all"
    if settings.get("AccountingStorageType", "").endswith("none") or shutil.which("sacct") is None:
        return Check("accounting", WARN, f"no accounting here: {without}")
    try:
        ask(["sacct", "-X", "-n", "-S", "now-1hours"])
    except OrchError as error:
        return Check("accounting", WARN, f"{error.what}: {without}", "ask your site whether slurmdbd runs")
    return Check("accounting", OK, "sacct answers")


def demand(source: str, asked: Resources, ask: CommandRunner, *, wanted: bool) -> Check:
    """Check whether the nodes that Slurm reports meet the requirements of a configuration."""
    try:
        partitions, nodes = partitions_here(ask(list(PARTITIONS))), read_nodes(ask(list(NODES)))
    except OrchError as error:
        return Check("nodes", WARN, f"cannot check whether nodes have what {source} requests: {error.what}")
    default = next((name for name, is_default in partitions.items() if is_default), "")
    missing = [name for name in filter(None, asked.partition.split(",")) if name not in partitions]
    if missing or not (asked.partition or default):
        which = f"partition {missing[0]}, which does not exist" if missing else "no partition, and there is no default"
        change = f"cluster.partition={default or next(iter(partitions), 'NAME')}"
        text = f"{source} names {which}; available: {', '.join(partitions)}"
    elif (short := shortfall(asked, nodes)) is not None:
        text, change = f"{source} requests more than nodes have: {short.words}", short.change
    else:
        where = asked.partition or default
        return Check("nodes", OK, f"partition {where} has what {source} requests: {asked_words(asked)}")
    hint = f"`orch submit {source} {change}`, or write that into ~/.config/orch/config.yaml" if change else "sinfo -Nel"
    return Check("nodes", FAIL if wanted else WARN, text, hint)


def promises(settings: Mapping[str, str]) -> Iterator[Check]:
    """Explain the site's settings: time to detect a failure, time to save on preemption, requeueing."""
    wait, timeout = seconds(settings.get("KillWait")), seconds(settings.get("SlurmdTimeout"))
    lead = f"{wait} s" if wait is not None else "an unknown time"
    yield Check("stop", OK, f"KillWait {lead}: the time that a job has to save after SIGTERM; --signal extends it")
    if wait is not None and wait < 10:
        yield Check(
            "stop",
            WARN,
            "that is short: saves that take longer rely on cluster.signal_lead",
            "cluster.signal_lead=300 leaves five minutes for a save, in ~/.config/orch/config.yaml or at submit",
        )
    if timeout is None or timeout == 0:
        text = "SlurmdTimeout is 0: Slurm never gives up on a silent node, so only heartbeats reveal a failure"
        yield Check("node failure", WARN, text)
    else:
        yield Check(
            "node failure", OK, f"a dead node is seen after SlurmdTimeout {timeout} s; then a new job, without it"
        )
    yield _preemption(settings)
    requeue = settings.get("JobRequeue", "?")
    yield Check("requeue", OK, f"JobRequeue {requeue}: orch submits with --no-requeue and starts new jobs itself")


def _preemption(settings: Mapping[str, str]) -> Check:
    mode, kind = settings.get("PreemptMode", "OFF"), settings.get("PreemptType", "")
    if mode.upper() == "OFF" or kind.endswith("none"):
        return Check("preemption", OK, "jobs are not preempted here")
    if "SUSPEND" in mode.upper() or "GANG" in mode.upper():
        text = f"PreemptMode {mode}: a preempted job may be stopped in place; it looks like a hang until it continues"
        return Check("preemption", WARN, text)
    return Check(
        "preemption", OK, f"PreemptMode {mode}: a preempted run saves and continues in a new job, outside the budget"
    )


def seconds(text: str | None) -> int | None:
    """Return the leading number: `30 sec` is 30."""
    match = re.match(r"(\d+)", text or "")
    return int(match[1]) if match else None


def periodic_passes() -> Check:
    """Check whether cron or scrontab keeps runs going after a reboot of this host."""
    from orchestrator.cli.cluster import crontab

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
        text = (
            "neither cron nor scrontab can be used: after a reboot of this host runs wait for your next `orch` command"
        )
        return Check("controller", WARN, text)
    text = "after a reboot of this host no controller runs until you type an `orch` command"
    return Check("controller", INFO, text, f"orch controller install --via {ways[0]}")


FIRST_RUN = "slurm-first-run"
"""Preset that a new user submits first."""
MARKS = {OK: "ok  ", INFO: "note", WARN: "warn", FAIL: "FAIL"}


@click.command(cls=Verb)
@click.option("--root", type=NonEmptyPath(path_type=Path), default=None, help="Folder for runs; default: cluster.root.")
@click.option("--config", "source", default="tiny-gpt", show_default=True, help="Configuration to take cluster.* from.")
@click.pass_obj
def doctor(screen: Screen, root: Path | None, source: str) -> int:
    """Check this machine and cluster, and list what to fix.

    It checks Python and packages, the state folder, the registry's file system, the folder of runs (write, fsync,
    rename, free space), Slurm's commands, whether its nodes have what the configuration requests, accounting, the
    settings that runs depend on (KillWait, SlurmdTimeout, PreemptMode, JobRequeue), and what starts a controller
    after a reboot. It changes nothing. The exit code is 4 if something must be fixed before runs can continue.
    """
    found: list[Check] = []
    cluster = _cluster(source, found)
    place = root or (Path(cluster["root"]) if cluster.get("root") else None)
    place = place.expanduser() if place else None
    found += machine(place)
    wanted = cluster.get("kind") == SLURM
    found += slurm(place, wanted=wanted, jobs=_jobs(source if wanted else FIRST_RUN))
    found.append(periodic_passes())
    failed = [check for check in found if check.level == FAIL]
    if screen.json:
        screen.data("doctor", {"ok": not failed, "checks": [check.__dict__ for check in found]})
    else:
        _show(screen, found)
    return Precondition.exit_code if failed else 0


def _cluster(source: str, found: list[Check]) -> dict[str, Any]:
    """Return the `cluster` section of the user's configuration; its errors become findings."""
    from orchestrator.config.compose import compose  # omegaconf: only for the verbs that read configurations

    try:
        cluster: dict[str, Any] = compose(source, (), environ=os.environ).data["cluster"]
    except OrchError as error:
        found.append(Check("config", FAIL, error.what, error.hint or error.where))
        return {}
    return cluster


def _jobs(source: str) -> dict[str, Resources]:
    """Return the resources of a run of this configuration, by its name; empty if Slurm is not available here."""
    from orchestrator.config.compose import compose  # omegaconf: as above
    from orchestrator.scheduler.available_schedulers import kinds
    from orchestrator.submission.create_run import first_job

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
    screen.note(f"{count[OK]} ok, {count[WARN]} to know, {count[FAIL]} to fix")
