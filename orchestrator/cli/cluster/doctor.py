"""`orch doctor`: what works on this machine and cluster, what orch can promise here, and what to mend."""

import os
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.cluster.lock_checks import registry_locks
from orchestrator.cli.cluster.machine_checks import FAIL, INFO, OK, WARN, Check, machine
from orchestrator.cli.cluster.slurm_checks import periodic_passes, slurm
from orchestrator.cli.terminal.argument_types import NonEmptyPath
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import OrchError, Precondition
from orchestrator.scheduler.interface import Resources
from trainer.contract.config_sections.scheduler_kinds import SLURM

FIRST_RUN = "slurm-first-run"
"""The preset that a newcomer submits first."""
MARKS = {OK: "ok  ", INFO: "note", WARN: "warn", FAIL: "FAIL"}


@click.command(cls=Verb)
@click.option("--root", type=NonEmptyPath(path_type=Path), default=None, help="Folder for runs; default: cluster.root.")
@click.option("--config", "source", default="tiny-gpt", show_default=True, help="Configuration to take cluster.* from.")
@click.option("--locks", is_flag=True, help="Also test the registry's locks with another host, through srun.")
@click.option("--peer", metavar="HOST", default="", help="As --locks, with HOST through ssh.")
@click.pass_obj
def doctor(screen: Screen, root: Path | None, source: str, locks: bool, peer: str) -> int:
    """Check this machine and cluster, and say what to fix.

    It changes nothing. Only --locks writes: it records its proof beside the registry, which may then be on a file
    system whose locks orch does not know. The exit code is 4 if something must be fixed before runs can continue.
    """
    found: list[Check] = []
    cluster = _cluster(source, found)
    place = root or (Path(cluster["root"]) if cluster.get("root") else None)
    place = place.expanduser() if place else None
    found += registry_locks(peer) if locks or peer else ()
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
    """The `cluster` part of the user's configuration; what is wrong with it is a finding."""
    from orchestrator.config.compose import compose  # omegaconf: only for the verbs that read configurations

    try:
        cluster: dict[str, Any] = compose(source, (), environ=os.environ).data["cluster"]
    except OrchError as error:
        found.append(Check("config", FAIL, error.what, error.hint or error.where))
        return {}
    return cluster


def _jobs(source: str) -> dict[str, Resources]:
    """What a run of this configuration asks of the nodes, by its name; nothing where Slurm is not here to be asked."""
    from orchestrator.config.compose import compose  # as above
    from orchestrator.scheduler.available_schedulers import kinds
    from orchestrator.submission.job_check import first_job

    if SLURM not in kinds():
        return {}
    try:
        return {source: first_job(compose(source, (), environ=os.environ).config, SLURM).resources}
    except OrchError:  # told by `_cluster`, where it is the configuration that was asked for
        return {}


def _show(screen: Screen, found: list[Check]) -> None:
    for check in found:
        screen.say(f"{MARKS[check.level]}  {check.text}", hang=6)
        if check.hint and check.level != OK:
            screen.say(f"      -> {check.hint}", hang=3)
    count = {level: sum(1 for check in found if check.level == level) for level in MARKS}
    screen.note(f"{count[OK]} ok, {count[WARN]} to know, {count[FAIL]} to mend")
