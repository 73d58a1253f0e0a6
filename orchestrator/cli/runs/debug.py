"""`orch debug`: a shell on one or two nodes like a run's, to start its ranks by hand."""

import os
import shlex
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.config import OVERRIDES, SOURCE, compose_config
from orchestrator.cli.live_jobs.shell import is_interactive, refuse_json, replace_process
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.home import make_state_home
from trainer.protocol.config_sections.scheduler_kinds import traits

MINUTES = "30"


@click.command(cls=Verb)
@SOURCE
@OVERRIDES
@click.option("--nodes", type=click.IntRange(1, 2), default=1, show_default=True, help="How many nodes to allocate.")
@click.option("--time", "limit", default=MINUTES, metavar="TIME", show_default=True, help="Slurm's time limit.")
@click.pass_obj
def debug(screen: Screen, source: str, overrides: tuple[str, ...], nodes: int, limit: str) -> None:
    """Allocate one or two nodes as a run would, and open a shell on the first.

    The job has the configuration's resources, account, templates, `env` and secrets, but a time limit of its own.
    Choose a partition for short jobs by its key: `orch debug my.yaml cluster.partition=debug cluster.qos=debug`.
    The command prints how to start the ranks by hand. No run is recorded, and the nodes are free again when the shell
    ends. The exit code is the shell's. Without Slurm the shell is on this machine.
    """
    refuse_json(screen, "orch debug")
    from orchestrator.scheduler import interactive
    from orchestrator.scheduler.available_schedulers import resolve
    from orchestrator.submission.create_run import first_job
    from orchestrator.submission.secret_values import separate_secrets
    from trainer.protocol.secrets.run_secrets import read_list

    composed = compose_config(source, overrides)
    config, kind = composed.config, resolve(composed.config.cluster.kind)
    secrets = separate_secrets(composed, os.environ).secrets.values
    secrets |= read_list(Path(config.secrets_file)) if config.secrets_file else {}
    job = first_job(config, kind)
    folder, files = os.getcwd(), make_state_home() / "debug"  # templates may write files there
    files.mkdir(mode=0o700, exist_ok=True)
    spec = replace(
        job, name=f"debug-{config.name}", run_dir=Path(folder), submission=files,
        resources=replace(job.resources, nodes=min(nodes, config.cluster.nodes), spares=0, time=limit),
    )  # fmt: skip
    environ = interactive.environment(spec, config.env, secrets, os.environ)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, config.cluster.cpus_per_task // config.cluster.ranks_per_node)))
    shell = interactive.shell_command(f"debug {config.name}")
    simulated = traits(kind).simulated_nodes
    for line in _instructions(config, spec.resources.nodes, source, overrides, simulated=simulated):
        (screen.raw if is_interactive() else screen.note)(line)  # raw: not wrapped, so that it can be copied
    if simulated:
        replace_process(interactive.local_words(spec, shell), environ, folder)
    from orchestrator.scheduler.slurm import sbatch  # submitit: only for Slurm

    step = interactive.step_words(spec, shell, place=["--relative=0"], folder=folder, terminal=is_interactive())
    replace_process((*sbatch.allocation_words(spec), *step), environ, folder)


def _instructions(config: Any, nodes: int, source: str, overrides: tuple[str, ...], *, simulated: bool) -> list[str]:
    """Return how to start the ranks by hand in the shell."""
    if not config.command:
        words = shlex.join(["orch", "submit", source, *overrides, "--cluster", "local", "--follow"])
        return [f"a run on the shell's node:  {words}"]
    program, *script = config.command
    is_python = os.path.basename(program).startswith("python")
    port = _free_port()
    one = f"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT={port}"
    torchrun = [
        "torchrun", f"--nnodes={nodes}", f"--nproc-per-node={config.cluster.ranks_per_node}", "--rdzv-backend=c10d",
    ]  # fmt: skip
    program_words = script if is_python else ["--no-python", *config.command]
    srun = f"srun --overlap --nodes={nodes} --ntasks={nodes} --cpus-per-task={config.cluster.cpus_per_task} "
    begin = "" if simulated or nodes == 1 else srun
    every = f"{begin}{shlex.join(torchrun)} --rdzv-endpoint=$(hostname):{port} {shlex.join(program_words)}"
    return [f"one rank:   {one} {shlex.join(config.command)}", f"all ranks:  {every}"]


def _free_port() -> int:
    """Return a port that is free on this machine, and so most likely on the node too."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
