"""The sbatch script of one attempt, and its submission with submitit's SlurmExecutor and orch's options."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from orchestrator.errors import ConfigError, Retryable, SlurmUnreachable, SubmitAmbiguous, SubmitRejected
from orchestrator.near_words import nearest
from orchestrator.scheduler import submitit_payload
from orchestrator.scheduler.interface import JobSpec, Resources
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.scheduler.job_tags import TAG_VARIABLE
from orchestrator.scheduler.script import prepare
from orchestrator.scheduler.slurm.client_environment import with_environment
from orchestrator.scheduler.slurm.command_output import expand_nodes, fold_nodes, require, run_command
from orchestrator.scheduler.slurm.node_capacity import known_nodes, known_partitions, shortfall
from orchestrator.scheduler.slurm.refusals import GRES, SIZE, is_of_sbatch, submit_error
from orchestrator.scheduler.slurm.sbatch_values import check_field, check_nodes, check_options, check_text, minutes

_SUBMITTED = re.compile(r"^Submitted batch job (\d+)", re.MULTILINE)
SBATCH_TIMEOUT_S = 60
_MAX_MESSAGES = 1 << 16
"""Most bytes read of sbatch's messages."""
_NO_FILES = ("--output=/dev/null", "--error=/dev/null")
"""Slurm opens output files by name and follows links; if others can plant links, the agents open the files instead."""
TEST_TIMEOUT_S = 10


class HeldExecutor(SlurmExecutor):  # type: ignore[misc]  # submitit is not type-checked here
    """SlurmExecutor that limits sbatch's run time and gives it the environment of the run's submitter."""

    submitter: Submitter
    spec: JobSpec
    words: Sequence[str] = ()
    """Command words before SCRIPT during submission; submitit cannot set an environment."""

    @classmethod
    def affinity(cls) -> int:
        return 2  # a script can be shown without Slurm

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} {submitit_payload.start_command(self.spec.run_dir, self.spec.submission)}"

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*self.words, str(submission_file_path)]

    def environ(self) -> dict[str, str]:
        """Return the environment of sbatch, and so of the job; the rest of this process's environment is hidden."""
        return self.submitter.environ(os.environ)


def _bounded_sbatch(seconds: float) -> list[str]:
    """Return the sbatch command, killed after this many seconds."""
    # The submitter's PATH must not select an sbatch whose Slurm differs from the queried one.
    timeout, sbatch = (shutil.which(program) or program for program in ("timeout", "sbatch"))
    return [timeout, "--kill-after=5", f"{seconds:g}", sbatch]


def executor(spec: JobSpec, folder: Path | None = None) -> HeldExecutor:
    """Return submitit's executor for this job; raises ConfigError for a value not allowed in a script.

    `folder`: name under which submitit reaches the job's folder if another user could rename it.
    """
    resources = spec.resources
    _check_path("cluster.root", spec.submission)
    _check_path("cluster.root", spec.run_dir)
    prepared = prepare(spec)
    made = HeldExecutor(folder=folder or spec.submission, python=prepared.python)
    made.submitter, made.spec = spec.submitter, spec
    by_name = folder in (None, spec.submission)
    setup = ["export SPT_NOENV=1", *prepared.setup]  # processes that rename themselves keep a readable environment
    setup.append(f"export {TAG_VARIABLE}={shlex.quote(spec.name)}")
    if prepared.own_interpreter and spec.submitter.package_root:
        setup.append(f"export PYTHONPATH={shlex.quote(spec.submitter.package_root)}")
    made.update_parameters(
        job_name=check_field("name", "name", spec.name),
        comment=check_field("name", "comment", spec.comment),
        nodes=resources.nodes,
        ntasks_per_node=1,
        cpus_per_task=resources.cpus_per_task,
        time=minutes("cluster.time", resources.time),
        signal_delay_s=resources.signal_lead,
        wckey=None,
        setup=setup,
        srun_args=[*_srun_arguments(resources), *([] if by_name else _NO_FILES), *prepared.srun],
        additional_parameters={
            **_placement(resources),
            **check_options(resources.sbatch),
            **_fixed_options(spec),
            **({} if by_name else {"output": "/dev/null", "error": "/dev/null"}),
        },
    )
    return made


def _placement(resources: Resources) -> dict[str, Any]:
    fields = (
        ("partition", resources.partition), ("account", resources.account), ("qos", resources.qos),
        ("constraint", resources.constraint), ("mem", resources.mem),
    )  # fmt: skip
    chosen: dict[str, Any] = {
        name: check_field(f"cluster.{name}", name, value) for name, value in fields if value != ""
    }
    if resources.exclude:
        chosen["exclude"] = check_nodes("cluster.exclude", resources.exclude)
    if resources.gpus_per_node:
        chosen["gpus-per-node"] = resources.gpus_per_node
    return chosen


def _fixed_options(spec: JobSpec) -> dict[str, Any]:
    """Return options that no configuration may change: the submission protocol and spare nodes depend on them."""
    return {
        **({"no-kill": True} if spec.resources.spares else {}),
        "hold": True,
        "no-requeue": True,
        "export": "ALL",
        "chdir": str(spec.run_dir),
        "signal": f"USR2@{spec.resources.signal_lead}",
        "open-mode": "append",
    }


def _srun_arguments(resources: Resources) -> list[str]:
    """Return srun arguments that keep agents alive to record outcomes when another agent or a node fails."""
    return [
        "--open-mode=append",
        "--kill-on-bad-exit=0",
        "--wait=0",
        *(["--no-kill"] if resources.spares else []),  # also if a node dies
        "--mpi=none",
        f"--cpus-per-task={resources.cpus_per_task}",
    ]


def _check_path(key: str, path: Path) -> None:
    """Refuse relative paths, '%' and backslashes, which Slurm expands, and quotes and control characters."""
    text = check_text(key, str(path))
    if not path.is_absolute() or any(char in text for char in "%\\'\""):
        raise ConfigError(
            f"{key}: {text!r} cannot be used in a job script",
            where=key,
            hint="use an absolute path without % \\ and quotes",
        )


def text(spec: JobSpec) -> str:
    """Return the sbatch script as it would be submitted."""
    made = executor(spec)
    return str(made._make_submission_file_text(made._submitit_command_str, ""))


def refusal(spec: JobSpec) -> SubmitRejected | None:
    """Return Slurm's refusal of this job without submitting it, or None.

    Also None if Slurm did not answer in time, or if a wrapper of sbatch does not support the query.

    WARNING: a job refused here because nodes are down may still be accepted: see `node_capacity.shortfall`. Raises
    ConfigError as `text` does.
    """
    made, script = executor(spec), text(spec)
    try:
        done = subprocess.run(
            [*_bounded_sbatch(TEST_TIMEOUT_S), "--test-only"], input=script, capture_output=True, text=True,
            errors="replace", timeout=2 * TEST_TIMEOUT_S, check=False, env=made.environ(),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if given := _SUBMITTED.search(done.stdout):  # by a site's wrapper that dropped the option
        run_command(["scancel", given[1]])
        return None
    error = submit_error(done.stderr) if done.returncode and is_of_sbatch(done.stderr) else None
    return explain_rejection(error, spec.resources) if isinstance(error, SubmitRejected) else None


def submit(spec: JobSpec, entry: str) -> str:
    """Submit the job held, return its id; raises SubmitRejected, SubmitAmbiguous, or Precondition without sbatch."""
    executor(spec)  # invalid values are refused before anything else is checked
    require("sbatch")
    function = submitit_payload.load_entry(entry)
    messages = b""
    try:
        with (
            submitit_payload.own_folder(spec) as folder,
            with_environment(spec.submitter.environ(os.environ), _bounded_sbatch(SBATCH_TIMEOUT_S)) as words,
            open(os.memfd_create("orch-sbatch"), "r+b") as errors,
        ):
            made = executor(spec, folder)
            made.words = _redirect_errors(errors.fileno(), words)
            try:
                return str(made.submit(function, *submitit_payload.arguments(spec)).job_id)
            finally:
                messages = os.pread(errors.fileno(), _MAX_MESSAGES, 0)
    except FailedJobError as error:
        refused = submit_error(messages.decode(errors="replace").strip() or str(error))
        raise explain_rejection(refused, spec.resources) if isinstance(refused, SubmitRejected) else refused from error
    except (OSError, RuntimeError) as error:  # submitit could not read sbatch's answer, or its files
        raise SubmitAmbiguous(
            f"sbatch ended, but not as expected: {error}", hint="the job is looked up by its name"
        ) from error


def _redirect_errors(descriptor: int, words: Sequence[str]) -> list[str]:
    """Return a command that runs `words` with stderr in this file.

    submitit prints a command's stderr, and sys.stderr is shared by all threads of a controller, so no thread may
    replace it.
    """
    return ["sh", "-c", 'exec "$@" 2>"$0"', f"/proc/{os.getpid()}/fd/{descriptor}", *words]


def explain_rejection(error: SubmitRejected, resources: Resources) -> SubmitRejected:
    """Add facts from Slurm to a refusal: its partitions, node capacity, or unknown nodes in `exclude`."""
    said = error.what.lower()
    with contextlib.suppress(SlurmUnreachable):
        if "invalid node name" in said:
            return _unknown_named(error, resources)
        if "partition" in error.change:
            _offer_partition(error, resources)
        elif error.hint in (SIZE, GRES) and (short := shortfall(resources, known_nodes())) is not None:
            error.hint, error.change = short.words, short.change or error.change
    for option in resources.sbatch:
        if re.search(rf"--{option.replace('_', '-')}\b", error.what):
            error.hint, error.change = "`man sbatch` tells what it takes", f"~cluster.sbatch.{option}"
    return error


def _offer_partition(error: SubmitRejected, resources: Resources) -> None:
    known = known_partitions()
    if not known:
        return
    asked = next((name for name in resources.partition.split(",") if name not in known), "")
    near = nearest(asked, known) or next((name for name, default in known.items() if default), next(iter(known)))
    error.hint = f"partitions here: {', '.join(known)}"
    error.change = f"cluster.partition={near}"


_WANTED = "nodelist"


def _unknown_named(error: SubmitRejected, resources: Resources) -> SubmitRejected:
    unknown = _unknown_nodes(resources)
    wanted = _wanted_nodes(resources)
    if wanted & unknown or (wanted and not resources.exclude):
        return _unknown_wanted(error, wanted, unknown)
    ours = tuple(node for node in resources.avoided if node in unknown)
    if ours:
        what = f"Slurm does not know {', '.join(ours)} any more, which orch avoided; the next try does without that"
        return SubmitRejected(what, retryable=Retryable.YES, unknown_nodes=ours)
    if unknown:
        error.what += f"; cluster.exclude names {', '.join(sorted(unknown))}, which Slurm does not know"
        left = {name for text in resources.exclude for name in expand_nodes(text)} - unknown
        error.change = f"cluster.exclude={fold_nodes(tuple(left))}" if left else "~cluster.exclude"
    return error


def _unknown_nodes(resources: Resources) -> set[str]:
    done = run_command(["sinfo", "-h", "-a", "-N", "-o", "%N"])
    if done.returncode != 0 or not done.stdout.strip():
        return set()
    excluded = {name for text in resources.exclude for name in expand_nodes(text)}
    return (excluded | _wanted_nodes(resources)) - set(done.stdout.split())


def _wanted_nodes(resources: Resources) -> set[str]:
    return set(expand_nodes(str(resources.sbatch.get(_WANTED, ""))))


def _unknown_wanted(error: SubmitRejected, wanted: set[str], unknown: set[str]) -> SubmitRejected:
    """Return the refusal of a node that the job requests by name."""
    key, left = f"cluster.sbatch.{_WANTED}", wanted - unknown
    if wanted & unknown:
        error.what += f"; {key} names {', '.join(sorted(wanted & unknown))}, which Slurm does not know"
    is_part = wanted & unknown and left
    error.change = f"{key}={fold_nodes(tuple(left))}" if is_part else f"{key}=NODES, or ~{key}"
    return error
