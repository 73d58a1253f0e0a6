"""Configurations merged into their schema by OmegaConf, equal ones once."""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from orchestrator.config.run_config import RunConfig


def merged(values: dict[str, Any]) -> dict[str, Any]:
    """Return the whole configuration with interpolations replaced; raises OmegaConfBaseException."""
    return deepcopy(_merged(_Values(repr(values), values)))


@dataclass(frozen=True)
class _Values:
    """Plain values, equal if they are written alike: 1, 1.0 and True are not."""

    written: str
    plain: dict[str, Any] = field(compare=False)


@lru_cache(maxsize=64)  # a controller composes the same configs in every pass, and merging is most of the work
def _merged(values: _Values) -> dict[str, Any]:
    from omegaconf import OmegaConf  # heavy

    whole = OmegaConf.merge(writable_schema(RunConfig), values.plain)
    found: dict[str, Any] = plain(OmegaConf.to_container(whole, resolve=True))
    return found


@cache  # building it takes as long as the rest of a composition, and `merge` copies its arguments
def writable_schema(kind: Any) -> Any:
    """Return an OmegaConf schema that `merge` accepts: frozen dataclasses make its sections read-only."""
    from omegaconf import DictConfig, OmegaConf  # heavy

    schema = OmegaConf.structured(kind)
    sections = [schema]
    for section in sections:
        OmegaConf.set_readonly(section, False)
        sections += [section[name] for name in section if isinstance(section[name], DictConfig)]
    return schema


def plain(value: Any) -> Any:
    """Return copies of all dicts and lists, with keys as text; tuples become lists."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
