"""What is said of a pipeline with so few micro-batches that its ranks wait for each other."""

from orchestrator.config.run_config import RunConfig
from trainer.contract.pipeline.micro_batches import too_few


def few_micro_batches(config: RunConfig) -> str | None:
    """A warning with the share of each step that ranks wait, and what to type; of a config whose layout fits."""
    if config.parallel.pipeline.stages == 1 or not config.trains_built_in_workload:
        return None
    return too_few(
        config.parallel.pipeline, config.train, config.parallel.data_parallel_size(config.cluster.world_size)
    )
