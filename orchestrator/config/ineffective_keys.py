"""Refusal of workload keys that have no effect on a `command:`. Pure."""

from collections.abc import Sequence
from typing import Any

from orchestrator.config import keys, plain_secrets
from orchestrator.config.layers import Assignment
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError

_PROGRAM = 'give the program an option of its own: command=[python, train.py, --epochs, "3"]'
_CHECKPOINTS = "the program saves its own checkpoints; checkpoints.path=FOLDER shows them to orch"
_OF_WORKLOADS: dict[keys.Path, str] = {
    ("workload", "args"): _PROGRAM,
    ("parallel",): "the program makes its own mesh of the ranks",
    ("model",): _PROGRAM,
    ("train",): _PROGRAM,
    ("optimizer",): _PROGRAM,
    ("validation",): _PROGRAM,
    ("checkpoint",): _CHECKPOINTS,
    ("detection", "spike"): "orch sees no loss of the program's",
}
"""Sections without effect on a command, and what to use instead."""


def refuse_ineffective(config: RunConfig, assignments: Sequence[Assignment]) -> None:
    """Raise ConfigError for the first assignment that has no effect on a `command`.

    `assignments`: values for this run alone, without the site file and presets. A key that another value refers to
    (`${train.steps}`) has an effect.
    """
    if not config.command:
        return
    texts = [text for item in assignments for text in _texts(item.value)]
    for item in assignments:
        instead = next((what for path, what in _OF_WORKLOADS.items() if item.path[: len(path)] == path), "")
        key = keys.dotted(item.path)
        if not instead or item.clears or any(f"${{{key}}}" in text for text in texts):
            continue
        hint = f"leave it out: {instead}"
        raise ConfigError(
            f"{key}: has no effect on a `command`", where=plain_secrets.place(item.origin) or item.origin, hint=hint
        )


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for item in items for text in _texts(item)]
