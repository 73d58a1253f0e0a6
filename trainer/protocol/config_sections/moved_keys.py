"""Config keys that moved to another section, and conversion of configs from older versions to the current keys."""

import copy
from collections.abc import Mapping
from typing import Any

Path = tuple[str, ...]

_OPTIMIZER = ("lr", "min_lr_ratio", "warmup_steps", "weight_decay", "clip_norm")
_DETECTION = ("hang", "straggler", "spike", "preflight")

MOVED: Mapping[Path, Path] = {
    ("recovery", "straggler", "replace_after"): ("recovery", "exclude_slow_after"),
    **{("train", name): ("optimizer", name) for name in _OPTIMIZER},
    **{("recovery", name): ("detection", name) for name in _DETECTION},
}
"""Old path -> current path; keys come before the sections that contained them."""

RENAMED: Mapping[Path, Mapping[str, str]] = {
    ("workload", "target"): {"trainer.worker.llama:LlamaWorkload": "trainer.models.built_in:LlamaWorkload"}
}
"""Keys whose old values have new names."""


def present_path(path: Path) -> Path:
    """Return the current path of a key."""
    for old, new in MOVED.items():
        if path[: len(old)] == old:
            return (*new, *path[len(old) :])
    return path


def in_present_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a resolved config of any version to the current keys, which win over moved keys."""
    renamed = [path for path, names in RENAMED.items() if _section(config, path).get(path[-1]) in names]
    if not renamed and not any(old[-1] in _section(config, old) for old in MOVED):
        return config
    found = copy.deepcopy(config)
    for path in renamed:
        section = _section(found, path)
        section[path[-1]] = RENAMED[path][section[path[-1]]]
    for old, new in MOVED.items():
        here = _section(found, old)
        if old[-1] in here:
            _fill(found, new, here.pop(old[-1]))
    return found


def _fill(section: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value unless one is set already, merging maps key by key.

    Leave the config unchanged if the path passes through a non-map.
    """
    *above, last = path
    for name in above:
        section[name] = {} if section.get(name) is None else section[name]
        section = section[name]
        if not isinstance(section, dict):
            return
    if isinstance(value, dict) and isinstance(section.get(last), dict):
        for key, entry in value.items():
            _fill(section[last], (key,), entry)
    else:
        section.setdefault(last, value)


def _section(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the map that contains the last name of a path, or an empty one."""
    section: Any = config
    for name in path[:-1]:
        section = section.get(name, {}) if isinstance(section, dict) else {}
    return section if isinstance(section, dict) else {}
