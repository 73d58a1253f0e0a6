"""Warning about a pipeline with too few micro-batches, whose ranks wait for each other."""

from orchestrator.config.run_config import RunConfig
from trainer.costs.micro_batches import too_few


def few_micro_batches(config: RunConfig) -> str | None:
    """Return a warning with the share of each step that ranks wait and a remedy, or None; needs a layout that fits."""
    if config.parallel.pipeline.stages == 1 or not config.trains_built_in_workload:
        return None
    return too_few(
        config.parallel.pipeline, config.train, config.parallel.data_parallel_size(config.cluster.world_size)
    )
