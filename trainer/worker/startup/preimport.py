"""Imports in the fork server that forked ranks need not repeat, and signal handling in DataLoader workers."""

import importlib
from collections.abc import Callable

from torch.utils.data._utils import signal_handling

from trainer.parallel import apply
from trainer.parallel.parallel_config import DIMENSIONS
from trainer.protocol.config import JobConfig
from trainer.protocol.rank_progress.progress import outlive_step_signals
from trainer.worker import workload


def protect_data_loader_workers() -> None:
    """Make DataLoader workers ignore Slurm's signals. They still exit with their DataLoader or their rank.

    Each worker first calls torch's `_set_worker_signal_handlers`. Its handlers end the worker on a SIGTERM from any
    process except its rank, and a lost worker ends the rank before it can save.
    """
    original = signal_handling._set_worker_signal_handlers  # type: ignore[attr-defined]
    if not isinstance(original, _Protected):
        signal_handling._set_worker_signal_handlers = _Protected(original)  # type: ignore[attr-defined]


class _Protected:
    def __init__(self, original: Callable[[], None]) -> None:
        self._original = original

    def __call__(self) -> None:
        self._original()
        outlive_step_signals()


_LAZY_MODULES = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.optim",
    "torch.utils.checkpoint",
    # Sharding decorates its hooks with `torch._dynamo.disable`, which imports all of these on its first call.
    "torch._dynamo",
    "torch._dynamo.convert_frame",
    "torch._dynamo.trace_rules",
    "torch._inductor.utils",
    "torch._inductor.custom_graph_pass",
    "torch.nn.utils._expanded_weights",
    "torch.onnx.operators",
    # `torch.save` and the profiler import these on their first call.
    "torch.utils.serialization.config",
    "torch.profiler._cupti_monitor",
    "encodings.idna",  # needed for host names in socket calls
    "checkpointing.engine.checkpointer",
)


def import_lazy_parts() -> None:
    """Import parts of torch in advance, so that a restart reads nothing from a replaced installation.

    It must not create tensors, because one parallel operation in a parent process would hang every forked child.
    """
    divisions = (f"{apply.__name__}.{one.torch_module}" for one in DIMENSIONS if one.torch_module)
    for name in (*_LAZY_MODULES, *divisions):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise


def import_workload(config: JobConfig) -> None:
    """Import the module of the run's workload. Its exceptions are not caught."""
    if not config.command:
        workload.find(config.workload)
