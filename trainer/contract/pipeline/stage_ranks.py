"""PURE: which rank of a pipeline has which stages."""

from trainer.contract.config_sections.pipeline_config import PipelineConfig, Schedule


def rank_of_stage(config: PipelineConfig, stage: int) -> int:
    """The rank within the pipeline: stages go round the ranks, with `zbv` forward and then back."""
    turn, place = divmod(stage, config.ranks)
    if config.schedule == Schedule.ZBV and turn % 2:
        return config.ranks - 1 - place
    return place


def stages_of_rank(config: PipelineConfig, rank: int) -> list[int]:
    """In the order of the model."""
    return [stage for stage in range(config.stages) if rank_of_stage(config, stage) == rank]
