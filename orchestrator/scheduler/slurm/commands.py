"""Running one of Slurm's commands: an answer, or `SlurmUnreachable`; never a guess."""

import os
import shutil
import subprocess
from collections.abc import Mapping

from orchestrator.errors import Precondition, SlurmUnreachable
from trainer.contract.cut_text import cut

TIMEOUT_S = 30.0

NO_CONTACT = (
    "unable to contact slurm controller", "unable to contact the slurm controller", "socket timed out",
    "connection refused", "zero bytes were transmitted or received", "connection timed out", "protocol authentication",
    "problem talking to the database", "connection reset", "communication connection failure",
    "message receive failure", "slurm controller is in standby", "unable to establish", "lost connection",
    "slurm backup controller",
)  # fmt: skip
"""Words with which Slurm's clients say that they got no answer."""

_OWN_OPTIONS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SBATCH_", "SINFO_", "SCONTROL_")


def query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of look-ups: no options that a user's shell adds, times in UTC, words in English."""
    kept = {key: value for key, value in environ.items() if not key.startswith(_OWN_OPTIONS)}
    return {**kept, "TZ": "UTC", "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}


def require(program: str) -> None:
    """Raise Precondition when this machine has no Slurm client."""
    if shutil.which(program) is None:
        raise Precondition(
            f"{program} is not on PATH: there is no Slurm on this machine",
            hint="work on a login node of the cluster, or use cluster.kind=local",
        )


def run_command(
    command: list[str], timeout: float = TIMEOUT_S, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; raises SlurmUnreachable when it is missing, takes too long or got no answer.

    `environ`: another environment than this process's own.
    """
    environ = os.environ if environ is None else environ
    if shutil.which(command[0], path=environ.get("PATH", os.defpath)) is None:
        hint = "load Slurm's module, or work on a login node of the cluster"
        raise SlurmUnreachable(f"{command[0]} is not on PATH: Slurm cannot be asked", hint=hint)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False,
            stdin=subprocess.DEVNULL, env=query_environment(environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SlurmUnreachable(
            f"{command[0]} gave no answer within {timeout:.0f} s",
            hint="nothing was assumed and nothing was changed; try again later",
        ) from error
    if done.returncode != 0 and no_contact(done.stderr):
        raise unreachable(command[0], done.stderr)
    return done


def no_contact(text: str) -> bool:
    """Whether this is how a Slurm client says that it got no answer."""
    lowered = text.lower()
    return any(words in lowered for words in NO_CONTACT)


def unreachable(program: str, said: str) -> SlurmUnreachable:
    """The error for a command that got no usable answer, with its own words."""
    words = cut(" ".join(said.split()), 300) or "no message"
    return SlurmUnreachable(
        f"{program} got no answer from Slurm: {words}",
        hint="nothing was assumed; `scontrol ping` tells when it is back",
    )
