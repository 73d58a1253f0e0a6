"""Command lines of interactive processes that have a job's environment, for `orch shell` and `orch debug`."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import Precondition
from orchestrator.scheduler.interface import JobSpec
from orchestrator.scheduler.script import Prepared, prepare, provide_mounted_agent
from trainer.protocol.rank_variables import PYTHON_VARIABLE
from trainer.protocol.run_dir import RunDir
from trainer.protocol.secrets import run_secrets
from trainer.protocol.secrets.run_secrets import SecretsRefused

_RUNNER = "env"
"""Program that takes the interpreter's place in the templates, and runs the words after it."""
_CREATION = re.compile(r"(?<=^--container-name=)([^:]*):create$")
_TERMINAL = ("TERM", "COLORTERM")


def shell_command(label: str) -> tuple[str, ...]:
    """Return the words of an interactive shell with this prompt. The user's .bashrc might select another Python."""
    return rf"PS1=({label}) \h:\w\$ ", "bash", "--norc"  # for `env`; a script's shell drops an inherited PS1


def run_environment(
    spec: JobSpec, config: RunConfig, folder: RunDir, attempt: int, own: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a run's processes. Raises Precondition if its secrets cannot be read."""
    try:
        secrets = run_secrets.values_for_job(folder, config)
    except SecretsRefused as error:
        raise Precondition(error.what, hint=error.hint) from error
    more = {"ORCH_RUN": folder.name, "ORCH_RUN_DIR": str(folder.path), "ORCH_ATTEMPT": str(attempt)}
    return environment(spec, config.env, secrets, own) | more


def environment(
    spec: JobSpec, variables: Mapping[str, str], secrets: dict[str, str], own: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a job's processes; `own` is this process's.

    `python` is the run's interpreter, unless a template or `env` chooses another one.
    """
    python = spec.python or spec.submitter.python
    made = spec.submitter.environ(own) | {name: own[name] for name in _TERMINAL if name in own}
    if os.path.isabs(python):
        made["PATH"] = os.pathsep.join([os.path.dirname(python), made.get("PATH", os.defpath)])
    if spec.submitter.package_root and not spec.python:
        made["PYTHONPATH"] = spec.submitter.package_root
    made |= variables
    run_secrets.enter(secrets, made)
    return made


def with_node_variables(
    command: Sequence[str], variables: Mapping[str, str], env: Mapping[str, str]
) -> tuple[str, ...]:
    """Return words for `env` that run the command with its node's variables and the staged interpreter.

    They take effect on the node, within its container, because their folders exist only there. `env` is the run's.
    """
    words = tuple(f"{name}={value}" for name, value in variables.items())
    python = variables.get(PYTHON_VARIABLE)
    if not python or "PATH" in env:
        return *words, *command
    first = f'PATH={shlex.quote(os.path.dirname(python))}:$PATH exec env "$@"'
    return *words, "sh", "-c", first, "sh", *command


def working_folder(identity: Mapping[str, Any], folder: RunDir, config: RunConfig) -> Path:
    """Return the folder in which the ranks work: the submit folder of a user's command, or else the run directory."""
    found = identity.get("submit_dir") if config.command else None
    return Path(found) if isinstance(found, str) else folder.path


def local_words(spec: JobSpec, command: Sequence[str]) -> tuple[str, ...]:
    """Return words that run the command on this machine after the templates' setup. Raises ConfigError."""
    prepared = _prepare(spec)
    return "bash", "-c", "\n".join([*prepared.setup, _start(prepared.python, command)])


def step_words(
    spec: JobSpec, command: Sequence[str], *, place: Sequence[str], folder: str, terminal: bool
) -> tuple[str, ...]:
    """Return words that run the command as one task of a job, beside its other tasks. Raises ConfigError.

    `place` has the options of srun that choose the job and the node. A container that srun creates gets its environment
    from the setup on this machine, as in a job script. Otherwise the setup runs on the node.
    """
    prepared = _prepare(spec)
    step = [
        "srun", *place, "--overlap", "--nodes=1", "--ntasks=1", f"--cpus-per-task={spec.resources.cpus_per_task}",
        "--cpu-bind=none", "--mpi=none", f"--chdir={folder}", *(["--pty"] if terminal else []), *prepared.srun,
    ]  # fmt: skip
    start = _start(prepared.python, command)
    if prepared.srun:
        return "bash", "-c", "\n".join([*prepared.setup, f"exec {shlex.join([*step, 'sh', '-c', start])}"])
    # The signal before the time limit reaches every process of the job, and would end a shell.
    return *step, "bash", "-c", "\n".join(["trap '' USR2", *prepared.setup, start])


def _prepare(spec: JobSpec) -> Prepared:
    """Fill the templates with a program that runs the words after it, in place of the interpreter."""
    prepared = prepare(replace(spec, python=_RUNNER))
    if prepared.mounted:
        provide_mounted_agent()
    # A second container must not overwrite the image that the job's own one is saved to, nor create the same name.
    srun = (_CREATION.sub(r"\1", option) for option in prepared.srun if not option.startswith("--container-save="))
    return replace(prepared, srun=tuple(srun))


def _start(python: str, command: Sequence[str]) -> str:
    """Return the shell line that runs the command where the templates start Python."""
    return f"exec {python} {shlex.join(command)}"
