"""The public API for training programs and for scripts on a login node.

    class MyWorkload(orch.BaseWorkload): ...                # in the file named by `workload.target`

    run = orch.submit("tiny-gpt", {"train.steps": 200})     # in a script
    print(run.wait().loss)

Names are imported on first use: `import orch` costs a few milliseconds and loads neither torch nor a database. Names in
`__all__` keep their meaning within a major version; everything else in orch's packages may change.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orch.command_line import OrchWarning
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
"""Names by defining module."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604, RUF022 (a test compares it with `_HOMES`)
    "BaseWorkload", "CheckpointInvalid", "ConfigError", "Data", "JobConfig", "LastCheckpoint", "Layout", "Mean",
    "Metric", "NotFound", "OrchError", "OrchWarning", "Precondition", "Rank0", "RegistryError", "Run", "RunCancelled",
    "RunFailed", "Scheduler", "SlurmUnreachable", "StatefulData", "SubmitRejected", "Sum", "WaitTimeout", "Workload",
    "WorkloadError", "__version__", "evaluating", "status", "submit", "wait",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("orch")
    if name not in _HOME_OF:
        raise _unknown_name_error(name, imported=sys._getframe(1).f_code.co_name == "_handle_fromlist")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


_MEANT = {"Trainer": "BaseWorkload", "Module": "BaseWorkload", "Model": "BaseWorkload", "Dataset": "Data"}
"""Names of the same concepts in other libraries; keys are compared without case."""


def _unknown_name_error(name: str, *, imported: bool) -> Exception:
    """Return the error for an unknown name; `imported`: the name comes from `from orch import`."""
    import difflib
    from importlib.util import find_spec

    by_word = {key.lower(): home for key, home in _MEANT.items()} | {key.lower(): key for key in reversed(__all__)}
    exact = [key for key in __all__ if key.lower() == name.lower()]
    near = exact or [by_word[word] for word in difflib.get_close_matches(name.lower(), by_word, n=1, cutoff=0.7)]
    meant = f"; did you mean orch.{near[0]}?" if near else ""
    if imported and not name.startswith("_") and find_spec(f"orch.{name}") is None:
        return ImportError(f"orch has no {name}{meant or _whole()}", name="orch", path=__file__)
    return AttributeError(f"module 'orch' has no attribute {name!r}{meant or _whole()}")


def _whole() -> str:
    return f"; it has {', '.join(__all__)}"


def __dir__() -> list[str]:
    return sorted(__all__)
