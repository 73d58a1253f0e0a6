"""PURE: which parameters a rank of a pipeline has."""

from trainer.contract.config import JobConfig
from trainer.contract.config_sections.parallel_config import place_in
from trainer.contract.model_costs.model_shapes import Parameter, parameters
from trainer.contract.pipeline.stage_fit import split_of
from trainer.contract.pipeline.stage_ranks import stages_of_rank
from trainer.contract.pipeline.stage_split import StagePart

_OF_FIRST, _OF_LAST = "embedding.", ("norm.", "output.")


def parameters_of_rank(config: JobConfig, rank: int) -> list[Parameter]:
    """Of all stages that `rank` has, in the order of the model; without a pipeline all of the model's."""
    known = list(parameters(config.model))
    if config.parallel.pipeline.stages == 1:
        return known
    parts = parts_of_rank(config, rank)
    return [parameter for parameter in known if any(has(part, parameter) for part in parts)]


def parts_of_rank(config: JobConfig, rank: int) -> list[StagePart]:
    """The stages of `rank`; raises ValueError for a model that cannot be split so."""
    pipeline = config.parallel.pipeline
    place, *_ = place_in(config.parallel.mesh_sizes(config.cluster.world_size), rank)
    parts = split_of(pipeline, config).parts
    return [parts[stage] for stage in stages_of_rank(pipeline, place)]


def has(part: StagePart, parameter: Parameter) -> bool:
    """Whether a parameter lies in this stage."""
    if parameter.name.startswith(_OF_FIRST):
        return part.is_first
    if parameter.name.startswith(_OF_LAST):
        return part.is_last
    return int(parameter.name.split(".")[1]) in part.layers
