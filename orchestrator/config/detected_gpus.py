"""The GPUs of this machine, which `${detected_gpus:}` counts in a configuration."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError

DETECTED = "${detected_gpus:}"


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, in the notation of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def count_gpus() -> int:
    """Return the number of GPUs. Raises ConfigError if there is none."""
    if found := visible_gpus():
        return len(found)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "/dev has no nvidia0" if shown is None else f"CUDA_VISIBLE_DEVICES={shown}"
    hint = "start the container with its GPUs (docker run --gpus all), or include cluster/local to train on CPUs"
    raise ConfigError(f"this machine has no GPU: {why}", where=DETECTED, hint=hint)


def fill_in_gpus(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config values with the number of GPUs for every `${detected_gpus:}`. Raises ConfigError without GPUs."""

    def fill_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            return fill_in_gpus(value)
        return count_gpus() if value == DETECTED else value

    return {name: fill_value(value) for name, value in values.items()}
