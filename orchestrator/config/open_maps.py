"""Values of maps whose keys are the user's own: arguments of a workload, and options for Slurm."""

import math
from typing import Any

from yaml.nodes import MappingNode, Node, SequenceNode

from orchestrator.config import keys, yaml_text
from orchestrator.errors import ConfigError

_SBATCH = "sbatch"
_WORKLOAD = "workload"


def value(node: Node, path: keys.Path, where: str) -> Any:
    """Return an entry of an open map as data: options for Slurm as they were typed, arguments as YAML reads them.

    Raises ConfigError for a word that most programs read as true or false, outside of Slurm's options, and for a number
    that is not finite: JSON has none, and `config.json` is what a job reads.
    """
    if path[0] != _WORKLOAD and _SBATCH in path:
        return yaml_text.as_typed(node)
    if isinstance(node, SequenceNode):
        return [value(item, path, where) for item in node.value]
    if isinstance(node, MappingNode):
        return {key.value: value(below, (*path, key.value), where) for key, below in node.value}
    if meant := yaml_text.old_boolean(node):
        what = f"`{keys.dotted(path)}` is the word {node.value}, which YAML 1.2 reads as text"
        hint = f'write {meant}, or "{node.value}" in quotes for the word'
        raise ConfigError(what, where=yaml_text.place_of(node, where), hint=hint)
    found = yaml_text.plain(node) if path[0] == _WORKLOAD else yaml_text.as_typed(node)
    if isinstance(found, float) and not math.isfinite(found):
        what = f"`{keys.dotted(path)}` is {node.value}: must be a finite number"
        hint = f'write "{found}" in quotes, and have the workload call float() on it'
        raise ConfigError(what, where=yaml_text.place_of(node, where), hint=hint)
    return found
