"""Import of a workload before a run exists: the modules that it loads, and settings that it does not support."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.submission.bounded_child import BoundedChild, ChildAnswer
from trainer.contract.config_sections.scheduler_kinds import traits
from trainer.contract.secrets import run_secrets
from trainer.contract.user_code.code_record import CodeRecord

IMPORT_WITHIN = 60.0
"""Time limit of an import in seconds, torch included; a slower import is left to the job."""
_MODULE = "trainer.worker.startup.inspect_workload"
_SAME_ENVIRONMENT = frozenset({"default", "nccl"})
"""Templates that add nothing to the job's import path."""

Note = Callable[[str], None]


class WorkloadInspection:
    """An import that is under way; `finish` waits for it."""

    def __init__(self, config: RunConfig, kind: str, child: BoundedChild | None) -> None:
        self._config, self._kind, self._child = config, kind, child

    def finish(self, note: Note, warn: Note) -> CodeRecord | None:
        """Return the imported code, or None if unknown. Raises ConfigError for a setting that would fail the job."""
        if self._child is None:
            return None
        return _judge(self._child.answer(IMPORT_WITHIN, note), self._config, self._kind, warn)


@contextmanager
def inspecting(config: RunConfig, kind: str, environ: Mapping[str, str]) -> Iterator[WorkloadInspection]:
    """Import the workload in a child process, which ends with this block.

    Nothing is imported for the built-in model, unless the configuration names classes of it, and nothing where jobs
    have another interpreter.
    """
    wrap = config.parallel.fsdp.wrap
    plain = config.trains_built_in_workload and (wrap == "auto" or wrap.isdecimal())
    if config.command or config.cluster.python or plain:
        yield WorkloadInspection(config, kind, None)
        return
    what = f"waiting for the import of {config.workload.target}, to see what it needs"
    with BoundedChild(_MODULE, asdict(config), job_environment(config, environ), what) as child:
        yield WorkloadInspection(config, kind, child)


def job_environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the job's processes will have, as far as they are known here."""
    submitter = Submitter.here(environ)
    path = {"PYTHONPATH": submitter.package_root} if submitter.package_root else {}
    made = {**submitter.environ(environ), **path, "OMP_NUM_THREADS": "1", **config.env}
    given = {name: environ[name] for name in config.env_from if name in environ}
    if config.secrets_file:
        with suppress(run_secrets.SecretsRefused, OSError):  # the submit itself names what is wrong with it
            given |= run_secrets.read_list(Path(config.secrets_file))
    run_secrets.enter(given, made)
    return made


def _judge(answer: ChildAnswer, config: RunConfig, kind: str, warn: Note) -> CodeRecord | None:
    target = config.workload.target
    if refused := answer.found.get("refused"):
        what, hint = refused
        raise ConfigError(what, where=f"workload.target={target}", hint=hint)
    if failed := answer.found.get("failed"):
        # Elsewhere there may be devices and files that are not here; modules are the same.
        if traits(kind).simulated_nodes or (answer.found["is_import"] and _same_environment(config)):
            raise ConfigError(failed, where="imported with the variables that a job has", hint=_HINT)
        warn(f"{failed}; the job imports it again, and fails if that happens there too")
    elif answer.died:
        warn(f"importing {target} ended its process: {answer.died}; the job imports it again")
    elif not answer.ended:
        warn(f"importing {target} takes longer than {IMPORT_WITHIN:.0f} s here, and was not waited for")
    return CodeRecord.from_json(answer.found.get("code"))


_HINT = "install what is missing for this interpreter, or mend the code; a job does not see this shell's PYTHONPATH"


def _same_environment(config: RunConfig) -> bool:
    return set(config.cluster.templates) <= _SAME_ENVIRONMENT
