"""Importing beforehand what torch would import late, so that a forked rank imports nothing more."""

import importlib

_LATE = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.optim",
    "torch.utils.checkpoint",
    "checkpointing.engine.checkpointer",
)


def import_lazy_parts() -> None:
    """Import torch's parts that training needs; no tensor is made, because one parallel operation in a parent
    process would hang every forked child.
    """
    for name in _LATE:
        importlib.import_module(name)
