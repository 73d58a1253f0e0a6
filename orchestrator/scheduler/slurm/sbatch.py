"""The sbatch script for one attempt, and its submission through submitit's SlurmExecutor with orch's options."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from orchestrator.errors import ConfigError, Retryable, SlurmUnreachable, SubmitAmbiguous, SubmitRejected
from orchestrator.near_words import nearest
from orchestrator.scheduler.interface import TAG_VARIABLE, JobSpec, Resources
from orchestrator.scheduler.script import load_entry, own_folder, prepare, start_arguments
from orchestrator.scheduler.slurm.command_output import expand_nodes, fold_nodes, require, run_command
from orchestrator.scheduler.slurm.node_capacity import known_nodes, known_partitions, shortfall
from orchestrator.scheduler.slurm.refusals import GRES, SIZE, is_of_sbatch, submit_error
from orchestrator.scheduler.slurm.sbatch_values import (
    GRES_GPU,
    PER_NODE,
    check_field,
    check_nodes,
    check_options,
    check_text,
    minutes,
    names_gpus,
)
from trainer.protocol.node_identity import EXPEDITE, REQUEUE_VARIABLE

_SUBMITTED = re.compile(r"^Submitted batch job (\d+)", re.MULTILINE)
SBATCH_TIMEOUT_S = 60
_MAX_MESSAGES = 1 << 16  # maximum bytes read from sbatch's messages
_NO_FILES = ("--output=/dev/null", "--error=/dev/null")
"""Slurm opens output files by name and follows links; if others can plant links, the agents open the files instead."""
TEST_TIMEOUT_S = 10


_CODE = """
import os, sys
with open(sys.argv[1], "rb") as memory:
    pairs = [pair.partition(b"=") for pair in memory.read().split(b"\\0") if pair]
os.execvpe(sys.argv[2], sys.argv[2:], {name: value for name, _, value in pairs})
"""


@contextmanager
def with_environment(environ: Mapping[str, str], command: Sequence[str]) -> Iterator[list[str]]:
    """Yield words that run `command` with exactly this environment, which only its owner can read. Raises OSError."""
    memory = os.memfd_create("orch-environment", os.MFD_CLOEXEC)
    try:
        pairs = (os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in environ.items())
        with os.fdopen(memory, "wb", closefd=False) as stream:
            stream.writelines(pairs)
        yield [sys.executable, "-ISc", _CODE, f"/proc/{os.getpid()}/fd/{memory}", *command]
    finally:
        os.close(memory)


class HeldExecutor(SlurmExecutor):  # type: ignore[misc]  # submitit is not type-checked here
    """SlurmExecutor whose submission command has a time limit and the environment of the run's submitter."""

    spec: JobSpec
    words: Sequence[str] = ()  # command words before SCRIPT during submission; submitit cannot set an environment

    @classmethod
    def affinity(cls) -> int:
        return 2  # a script can be shown without Slurm

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} {start_arguments(self.spec.run_dir, self.spec.submission)}"

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*self.words, str(submission_file_path)]


def _bounded_sbatch(seconds: float) -> list[str]:
    """Return the sbatch command, killed after this many seconds."""
    # The submitter's PATH must not select an sbatch whose Slurm differs from the queried one.
    timeout, sbatch = (shutil.which(program) or program for program in ("timeout", "sbatch"))
    return [timeout, "--kill-after=5", f"{seconds:g}", sbatch]


def executor(spec: JobSpec, folder: Path | None = None, *, expedite: bool = False) -> HeldExecutor:
    """Return submitit's executor for this job. Raises ConfigError for a value not allowed in a script.

    `folder` is a name under which submitit reaches the job's folder even if another user renames it. `expedite` lets
    Slurm requeue the job after a node failure.
    """
    resources = spec.resources
    _check_path("cluster.root", spec.submission)
    _check_path("cluster.root", spec.run_dir)
    prepared = prepare(spec)
    made = HeldExecutor(folder=folder or spec.submission, python=prepared.agent)
    made.spec = spec
    by_name = folder in (None, spec.submission)
    setup = ["export SPT_NOENV=1", *prepared.setup]  # renamed processes keep a readable environment
    setup.append(f"export {TAG_VARIABLE}={shlex.quote(spec.name)}")
    setup += [f"export {REQUEUE_VARIABLE}={EXPEDITE}"] if expedite else []
    if prepared.own_interpreter and spec.submitter.package_root:
        setup.append(f"export PYTHONPATH={shlex.quote(spec.submitter.package_root)}")
    made.update_parameters(
        job_name=check_field("name", spec.name, "name"), comment=check_field("name", spec.comment, "comment"),
        nodes=resources.nodes, ntasks_per_node=1, cpus_per_task=resources.cpus_per_task,
        time=minutes("cluster.time", resources.time), signal_delay_s=resources.signal_lead, wckey=None, setup=setup,
        srun_args=[*_srun_arguments(resources), *([] if by_name else _NO_FILES), *prepared.srun],
        additional_parameters={
            **_placement(resources),
            **_options(resources),
            **_fixed_options(spec),
            **({"requeue": EXPEDITE} if expedite else {"no-requeue": True}),
            **({} if by_name else {"output": "/dev/null", "error": "/dev/null"}),
        },
    )  # fmt: skip
    return made


def _placement(resources: Resources) -> dict[str, Any]:
    fields = (
        ("partition", resources.partition), ("account", resources.account), ("qos", resources.qos),
        ("constraint", resources.constraint), ("mem", resources.mem),
    )  # fmt: skip
    chosen: dict[str, Any] = {
        name: check_field(f"cluster.{name}", value, name) for name, value in fields if value != ""
    }
    if resources.exclude:
        chosen["exclude"] = check_nodes("cluster.exclude", resources.exclude)
    if resources.gpus_per_node and resources.gpus == PER_NODE:
        chosen["gpus-per-node"] = resources.gpus_per_node
    return chosen


def allocation_words(spec: JobSpec) -> tuple[str, ...]:
    """Return the words of salloc for nodes like the job's, without the command to run. Raises ConfigError."""
    resources = spec.resources
    options = {
        "job-name": check_field("name", spec.name, "name"), "nodes": resources.nodes, "ntasks-per-node": 1,
        "cpus-per-task": resources.cpus_per_task, "time": minutes("cluster.time", resources.time),
        **_placement(resources), **_options(resources),
    }  # fmt: skip
    return "salloc", *(f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items())


def _options(resources: Resources) -> dict[str, Any]:
    """Return the user's own options; with `cluster.gpus=gres`, their `gres` names the GPUs or gets them added."""
    options = check_options(resources.sbatch)
    given = str(options.get("gres", ""))
    if resources.gpus_per_node and resources.gpus == GRES_GPU and not names_gpus(given):
        options["gres"] = ",".join(filter(None, (given, f"gpu:{resources.gpus_per_node}")))
    return options


def _fixed_options(spec: JobSpec) -> dict[str, Any]:
    """Return options that no configuration may change: the submission protocol and spare nodes depend on them."""
    return {
        **({"no-kill": True} if spec.resources.spares else {}),
        "hold": True,
        "export": "ALL",
        "chdir": str(spec.run_dir),
        "signal": f"USR2@{spec.resources.signal_lead}",
        "open-mode": "append",
    }


def _srun_arguments(resources: Resources) -> list[str]:
    """Return srun arguments that keep agents alive to record outcomes when another agent or a node fails."""
    no_kill = ["--no-kill"] if resources.spares else []  # even if a node dies
    cpus = f"--cpus-per-task={resources.cpus_per_task}"
    return ["--open-mode=append", "--kill-on-bad-exit=0", "--wait=0", *no_kill, "--mpi=none", cpus]


def _check_path(key: str, path: Path) -> None:
    """Refuse relative paths, '%' and backslashes, which Slurm expands, and quotes and control characters."""
    text = check_text(key, str(path))
    if not path.is_absolute() or any(char in text for char in "%\\'\""):
        hint = "use an absolute path without % \\ and quotes"
        raise ConfigError(f"{key}: {text!r} cannot be used in a job script", where=key, hint=hint)


def text(spec: JobSpec, *, expedite: bool = False) -> str:
    """Return the sbatch script as it would be submitted."""
    made = executor(spec, expedite=expedite)
    return str(made._make_submission_file_text(made._submitit_command_str, ""))


def refusal(spec: JobSpec) -> SubmitRejected | None:
    """Return Slurm's refusal of this job without submitting it, or None.

    The result is also None if Slurm does not answer in time, or if an sbatch wrapper does not support the query.

    WARNING: a job refused here because nodes are down may still be accepted: see `node_capacity.shortfall`. Raises
    ConfigError as `text` does.
    """
    try:
        done = subprocess.run(
            [*_bounded_sbatch(TEST_TIMEOUT_S), "--test-only"], input=text(spec), capture_output=True, text=True,
            errors="replace", timeout=2 * TEST_TIMEOUT_S, check=False, env=spec.submitter.environ(os.environ),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if given := _SUBMITTED.search(done.stdout):  # a site's wrapper dropped the option
        run_command(["scancel", given[1]])
        return None
    error = submit_error(done.stderr) if done.returncode and is_of_sbatch(done.stderr) else None
    return explain_rejection(error, spec.resources) if isinstance(error, SubmitRejected) else None


def submit(spec: JobSpec, entry: str, *, expedite: bool = False) -> str:
    """Submit the job held and return its id. Raises SubmitRejected, SubmitAmbiguous, or Precondition without sbatch."""
    executor(spec)  # invalid values are refused before anything else is checked
    require("sbatch")
    function = load_entry(entry)
    messages = b""
    try:
        with (
            own_folder(spec) as folder,
            with_environment(spec.submitter.environ(os.environ), _bounded_sbatch(SBATCH_TIMEOUT_S)) as words,
            open(os.memfd_create("orch-sbatch"), "r+b") as errors,
        ):
            made = executor(spec, folder, expedite=expedite)
            made.words = _redirect_errors(errors.fileno(), words)
            try:
                return str(made.submit(function, str(spec.run_dir), str(spec.attempt)).job_id)
            finally:
                messages = os.pread(errors.fileno(), _MAX_MESSAGES, 0)
    except FailedJobError as error:
        refused = submit_error(messages.decode(errors="replace").strip() or str(error))
        raise explain_rejection(refused, spec.resources) if isinstance(refused, SubmitRejected) else refused from error
    except (OSError, RuntimeError) as error:  # submitit could not read sbatch's answer, or its files
        raise SubmitAmbiguous(f"unexpected end of sbatch: {error}", hint="the job is looked up by its name") from error


def _redirect_errors(descriptor: int, words: Sequence[str]) -> list[str]:
    """Return a command that runs `words` with stderr redirected to this file.

    submitit prints a command's stderr, and sys.stderr is shared by all threads of a controller, so no thread may
    replace it.
    """
    return ["sh", "-c", 'exec "$@" 2>"$0"', f"/proc/{os.getpid()}/fd/{descriptor}", *words]


def explain_rejection(error: SubmitRejected, resources: Resources) -> SubmitRejected:
    """Add facts from Slurm to a refusal: its partitions, node capacity, or unknown nodes in the request."""
    with contextlib.suppress(SlurmUnreachable):
        if "invalid node name" in error.what.lower():
            return _name_unknown_nodes(error, resources)
        if "partition" in error.change and (known := known_partitions()):
            asked = next((name for name in resources.partition.split(",") if name not in known), "")
            default = next((name for name, is_default in known.items() if is_default), next(iter(known)))
            error.hint = f"partitions here: {', '.join(known)}"
            error.change = f"cluster.partition={nearest(asked, known) or default}"
        elif error.hint in (SIZE, GRES) and (short := shortfall(resources, known_nodes())) is not None:
            error.hint, error.change = short.words, short.change or error.change
    for option in resources.sbatch:
        if re.search(rf"--{option.replace('_', '-')}\b", error.what):
            error.hint, error.change = "see `man sbatch` for its values", f"~cluster.sbatch.{option}"
    return error


def _name_unknown_nodes(error: SubmitRejected, resources: Resources) -> SubmitRejected:
    """Add the unknown nodes to a refusal, which is retryable if orch itself avoided them."""
    done = run_command(["sinfo", "-h", "-a", "-N", "-o", "%N"])
    here = set(done.stdout.split()) if done.returncode == 0 else set()
    excluded = {name for text in resources.exclude for name in expand_nodes(text)}
    wanted = set(expand_nodes(str(resources.sbatch.get("nodelist", ""))))
    unknown = (excluded | wanted) - here if here else set()
    ours = tuple(node for node in resources.avoided if node in unknown)
    if ours and not wanted & unknown:
        what = f"Slurm no longer knows {', '.join(ours)}, which orch avoided; the next try no longer does"
        return SubmitRejected(what, retryable=Retryable.YES, unknown_nodes=ours)
    is_listed = wanted and (wanted & unknown or not excluded)
    key, named = ("cluster.sbatch.nodelist", wanted) if is_listed else ("cluster.exclude", excluded)
    if named & unknown:
        error.what += f"; {key} names {', '.join(sorted(named & unknown))}, which Slurm does not know"
    left = fold_nodes(tuple(named - unknown)) if named & unknown and named - unknown else ""
    error.change = f"{key}={left}" if left else f"~{key}"
    return error
