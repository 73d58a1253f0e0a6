"""Conversion of configs of older versions to the current keys."""

import copy
from typing import Any

MOVED: dict[tuple[str, ...], tuple[str, str]] = {
    ("recovery", "straggler", "replace_after"): ("recovery", "exclude_slow_after"),
    **{
        ("train", name): ("optimizer", name)
        for name in ("lr", "min_lr_ratio", "warmup_steps", "weight_decay", "clip_norm")
    },
    **{("recovery", name): ("detection", name) for name in ("hang", "straggler", "spike", "preflight")},
}
"""Old path -> current section and name; keys come before the sections that contained them."""
_TARGETS = {"trainer.worker.llama:LlamaWorkload": "trainer.models.built_in:LlamaWorkload"}


def in_present_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a resolved config of any version to the current keys, which win over moved keys."""
    found = copy.deepcopy(config)
    for old, (section, name) in MOVED.items():
        here = _section(found, old[:-1])
        if old[-1] in here:
            value, there = here.pop(old[-1]), found.setdefault(section, {})
            if isinstance(there, dict):
                there.setdefault(name, value)
    workload = _section(found, ("workload",))
    if (target := workload.get("target")) in _TARGETS:
        workload["target"] = _TARGETS[target]
    return found


def _section(config: Any, path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        config = config.get(name, {}) if isinstance(config, dict) else {}
    return config if isinstance(config, dict) else {}
