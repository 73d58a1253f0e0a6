"""`orch init`: the user's own settings, from the answers of Slurm."""

import getpass
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from checkpointing.storage.durable import write_durably
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count
from orchestrator.config.layers import user_file
from orchestrator.config.yaml_text import format_list_items
from orchestrator.errors import ConfigError, Precondition
from orchestrator.registry import file_systems
from orchestrator.scheduler.slurm.command_output import require, require_configuration
from orchestrator.scheduler.slurm.site_survey import Partition, SiteSurvey, survey

_SHARED_VARIABLES = ("SCRATCH", "PSCRATCH", "WORK", "PROJECT")
"""Variables in which sites name a user's folder on the shared file system."""
_SHARED_FOLDERS = ("/scratch/{user}", "/work/{user}", "/shared/{user}", "/lustre/{user}", "/data/{user}")
RUNS = "orch-runs"
INIT_JSON = "{file, written, settings, partitions, accounts, qos}"
Ask = Callable[[str, str, Sequence[str]], str]
"""Function that asks a question with a default answer and the known answers (empty: any)."""


@click.command(cls=Verb, json_data=INIT_JSON)
@click.option("-y", "--yes", is_flag=True, help="Take the defaults without asking. Required without a terminal.")
@click.option("--print", "only_print", is_flag=True, help="Print the file instead of writing it.")
@click.pass_obj
def init(screen: Screen, yes: bool, only_print: bool) -> int:
    """Ask Slurm about this cluster, and write your settings.

    The file is ~/.config/orch/config.yaml (or `ORCH_USER_CONFIG`). It holds the folder for runs, the partition, the
    account and the QOS, which every later `orch submit` uses. A file that exists is replaced only after a question,
    and kept as config.yaml.old. The exit code is 4 on a machine without Slurm: there, orch needs no settings.
    """
    require("sbatch")
    require_configuration(os.environ)
    file, user = user_file(os.environ), getpass.getuser()
    found = survey(user)
    if not found.partitions:
        raise Precondition("sinfo lists no partition that you may use", where="sinfo -a", hint="ask your site")
    _show_partitions(screen, found)
    interactive = not yes and sys.stdin.isatty() and not screen.json
    if not (yes or only_print or interactive):
        raise ConfigError("the settings cannot be asked for", where="stdin is not a terminal", hint="orch init -y")
    settings = choose_settings(found, guess_root(os.environ, user), _ask if interactive else _take_default)
    text = settings_text(settings, found)
    written = not only_print and _write(screen, file, text, interactive)
    answer = {
        "file": str(file), "written": written, "settings": settings, "accounts": found.accounts, "qos": found.qos,
        "partitions": [_row(item) for item in found.partitions],
    }  # fmt: skip
    end = f"written: {file}" if written else "nothing was written"
    screen.answer(
        "init", answer, text.rstrip(), note=f"{end}\nnext: `orch doctor`, then `orch submit --from-sbatch job.sh`"
    )
    return 0


def _row(item: Partition) -> dict[str, Any]:
    shape = item.main_shape
    return {
        "partition": item.name, "default": item.is_default, "up": item.is_up, "limit": item.longest or None,
        "default_time": item.default_time or None, "nodes": sum(one.nodes for one in item.shapes),
        "cores": shape.cores, "memory_mib": shape.memory, "gpus": shape.gpus,
    }  # fmt: skip


def _show_partitions(screen: Screen, found: SiteSurvey) -> None:
    if screen.json:
        return
    columns = [
        Column("PARTITION", "partition"), Column("NODES", "nodes", count, right=True),
        Column("CORES", "cores", count, right=True), Column("MEMORY (MIB)", "memory_mib", count, right=True),
        Column("GPUS", "gpus", count, right=True), Column("LIMIT", "limit"), Column("DEFAULT TIME", "default_time"),
    ]  # fmt: skip
    screen.table(columns, [_row(item) for item in found.partitions], aligned=True)


def _ask(question: str, default: str, known: Sequence[str]) -> str:
    kind = click.Choice(known) if known else None
    return str(click.prompt(question, default=default, type=kind, err=True)).strip()


def _take_default(question: str, default: str, known: Sequence[str]) -> str:
    return default


def guess_root(environ: Mapping[str, str], user: str) -> Path:
    """Return the likeliest folder for runs: on a file system that other hosts may share, or else in the home folder."""
    named = [environ[name] for name in _SHARED_VARIABLES if environ.get(name, "").startswith("/")]
    places = [*named, *(pattern.format(user=user) for pattern in _SHARED_FOLDERS)]
    home = Path(environ.get("HOME") or Path.home())
    for place in map(Path, places):
        mount = file_systems.find_mount(place)
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK) and not (mount and mount.is_local):
            return place / RUNS
    return home / RUNS


def choose_settings(found: SiteSurvey, root: Path, ask: Ask) -> dict[str, str]:
    """Return the values of `cluster` that the user chooses, or the defaults. An empty value leaves the key out."""
    chosen = {"root": ask("Folder for runs, on a file system that all nodes share", str(root), ())}
    names = [item.name for item in found.partitions]
    default = next((item.name for item in found.partitions if item.is_default), names[0])
    chosen["partition"] = ask("Partition", default, names) if len(names) > 1 else default
    if found.accounts:
        account = found.default_account or found.accounts[0]
        chosen["account"] = ask("Account", account, found.accounts) if len(found.accounts) > 1 else account
    if len(found.qos) > 1:
        chosen["qos"] = ask("QOS (none: the account's default)", "none", ["none", *found.qos]).replace("none", "")
    return {key: value for key, value in chosen.items() if value}


def settings_text(settings: Mapping[str, str], found: SiteSurvey) -> str:
    """Return the settings as YAML, with what the partition's nodes have."""
    partition = next(item for item in found.partitions if item.name == settings["partition"])
    lines = [
        "# Written by `orch init`. Every run gets these values, unless its configuration or command line sets others."
    ]
    lines.append("cluster:")
    lines += [f"  {key}: {format_list_items([value])}" for key, value in settings.items()]
    limit = f"; at most {partition.longest}" if partition.longest else ""
    lines.append(f"# {partition.name}: {', '.join(shape.words() for shape in partition.shapes)}{limit}")
    shape = partition.main_shape
    whole = {"ranks_per_node": shape.gpus, "gpus_per_node": shape.gpus, "cpus_per_task": shape.cores, "mem": 0}
    keys = " ".join(f"cluster.{key}={json.dumps(value)}" for key, value in whole.items() if value or key == "mem")
    lines.append(f"# Whole nodes of it, on the command line of a run: {keys}")
    return "\n".join([*lines, ""])


def _write(screen: Screen, file: Path, text: str, interactive: bool) -> bool:
    """Write the file, and return whether it has this text now. An existing one is replaced only after a question."""
    if file.is_file():
        if file.read_text(errors="replace") == text:
            return True
        if not interactive:
            hint = "edit it; `orch init --print` prints what this command would write; or remove it first"
            raise ConfigError("the file exists, and `orch init -y` does not replace it", where=str(file), hint=hint)
        if not click.confirm(f"{file} exists. Replace it?", err=True):
            return False
        os.replace(file, file.with_name(f"{file.name}.old"))
        screen.note(f"the old file is {file}.old")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, text.encode())
    return True
