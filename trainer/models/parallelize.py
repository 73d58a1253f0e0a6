"""Division of the built-in model among ranks, one parallel dimension after the other."""

from importlib import import_module

from trainer.models.llama import Llama
from trainer.parallel import apply
from trainer.parallel.apply.fsdp_units import CannotShard
from trainer.parallel.apply.mesh import Layout
from trainer.parallel.dimension import Splits
from trainer.parallel.layout import refusal
from trainer.parallel.parallel_config import DIMENSIONS
from trainer.protocol.config import JobConfig
from trainer.worker.workload import WorkloadError


def check(config: JobConfig) -> None:
    """Raise WorkloadError for a layout that does not fit, as `orch submit` does."""
    if refused := refusal(config):
        raise WorkloadError(str(refused))


def shard(model: Llama, layout: Layout, config: JobConfig) -> None:
    """Divide `model`, on the meta device, in place: innermost dimension first, FSDP last."""
    try:
        for dimension in reversed(DIMENSIONS):
            divides = dimension.splits is Splits.BATCH or dimension.size(config.parallel) > 1
            if divides and dimension.torch_module:
                import_module(f"{apply.__name__}.{dimension.torch_module}").apply(model, layout, config)
    except CannotShard as error:
        raise WorkloadError(str(error)) from error
