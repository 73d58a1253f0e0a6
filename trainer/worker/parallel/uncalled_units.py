"""Detects a layer used without calling the FSDP unit that gathers its parameters; torch's error names neither."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.worker.parallel.fsdp_units import CannotShard, class_name

_MIXED = "mixed torch.Tensor and DTensor"
_MOST = 6
WITHOUT_SHARDS = "type parallel.strategy=ddp train.dtype=float32"


@contextmanager
def explain_uncalled_units(model: nn.Module) -> Iterator[None]:
    """Raise CannotShard in place of torch's error about whole and sharded tensors in one operation."""
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise CannotShard(_reason(model)) from error


def _reason(model: nn.Module) -> str:
    units = [name or "the whole model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    layers = {
        class_name(module)
        for module in model.modules()
        if any(isinstance(one, DTensor) for one in module._parameters.values())
    }
    return (
        "a layer was used without a call of the part that it is sharded with, which gathers its parameters "
        f"({_join_names(units)}): call these parts, or shard each layer by itself (type "
        f"parallel.fsdp.wrap={','.join(sorted(layers)[:_MOST])}), or do not shard ({WITHOUT_SHARDS})"
    )


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
