"""The public API for training programs and for scripts on a login node.

    class MyWorkload(orch.BaseWorkload): ...                # in the file named by `workload.target`

    run = orch.submit("tiny-gpt", {"train.steps": 200})     # in a script
    print(run.wait().loss)

    orch.step(n, loss=loss)                                 # in a training loop of your own, see `orch.program`
    if orch.should_save(): ...

Names are imported on first use: `import orch` costs a few milliseconds and loads neither torch nor a database. Names in
`__all__` keep their meaning within a major version; everything else in orch's packages may change.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orch.command_line import OrchWarning
    from orch.program import batches, checkpointer, resume_path, saved, should_save, should_stop, step
    from orch.runs import LastCheckpoint, Run, status, submit, wait
    from orchestrator.errors import (
        CheckpointInvalid,
        ConfigError,
        NotFound,
        OrchError,
        Precondition,
        RegistryError,
        RunCancelled,
        RunFailed,
        SlurmUnreachable,
        SubmitRejected,
        WaitTimeout,
    )
    from trainer.parallel.apply.mesh import Layout
    from trainer.protocol.config import JobConfig
    from trainer.worker.data import Data, StatefulData
    from trainer.worker.workload import (
        BaseWorkload,
        Mean,
        Metric,
        Rank0,
        Scheduler,
        Sum,
        Workload,
        WorkloadError,
        evaluating,
    )

    __version__: str

_HOMES = {
    "orch.command_line": ("OrchWarning",),
    "orch.program": ("batches", "checkpointer", "resume_path", "saved", "should_save", "should_stop", "step"),
    "orch.runs": ("LastCheckpoint", "Run", "status", "submit", "wait"),
    "orchestrator.errors": (
        "CheckpointInvalid", "ConfigError", "NotFound", "OrchError", "Precondition", "RegistryError", "RunCancelled",
        "RunFailed", "SlurmUnreachable", "SubmitRejected", "WaitTimeout",
    ),
    "trainer.protocol.config": ("JobConfig",),
    "trainer.worker.data": ("Data", "StatefulData"),
    "trainer.parallel.apply.mesh": ("Layout",),
    "trainer.worker.workload": (
        "BaseWorkload", "Mean", "Metric", "Rank0", "Scheduler", "Sum", "Workload", "WorkloadError", "evaluating",
    ),
}  # fmt: skip
"""Public names, keyed by the module that defines them."""
_HOME_BY_NAME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604, RUF022 (a test compares it with `_HOMES`)
    "BaseWorkload", "CheckpointInvalid", "ConfigError", "Data", "JobConfig", "LastCheckpoint", "Layout", "Mean",
    "Metric", "NotFound", "OrchError", "OrchWarning", "Precondition", "Rank0", "RegistryError", "Run", "RunCancelled",
    "RunFailed", "Scheduler", "SlurmUnreachable", "StatefulData", "SubmitRejected", "Sum", "WaitTimeout", "Workload",
    "WorkloadError", "__version__", "batches", "checkpointer", "evaluating", "resume_path", "saved", "should_save",
    "should_stop", "status", "step", "submit", "wait",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("orch")
    if name not in _HOME_BY_NAME:
        # `from orch import` must still find this package's modules, so this is not an ImportError.
        near = difflib.get_close_matches(name, __all__, n=1)
        hint = f"did you mean orch.{near[0]}?" if near else f"it has {', '.join(__all__)}"
        raise AttributeError(f"module 'orch' has no attribute {name!r}; {hint}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_BY_NAME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
