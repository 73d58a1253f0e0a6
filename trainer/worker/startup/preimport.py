"""Imports in the parent what torch would import lazily, so that a forked rank imports nothing more."""

import importlib

from trainer.contract.config import JobConfig
from trainer.worker import workload

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
    "checkpointing.engine.checkpointer",
)


def import_lazy_parts() -> None:
    """Import torch's parts that training needs; no tensor is made, because one parallel operation in a parent
    process would hang every forked child.
    """
    for name in _LAZY_MODULES:
        importlib.import_module(name)


def import_workload(config: JobConfig) -> None:
    """Import the module of the run's workload; raises what that raises."""
    if not config.command:
        workload.find(config.workload)
