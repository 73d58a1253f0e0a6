"""Checks for numbers in configuration sections."""

import math


def require_least(section: str, config: object, **least: float) -> None:
    """Raise ValueError for a field that is infinite or below its minimum."""
    for name, minimum in least.items():
        if not minimum <= (value := getattr(config, name)) < math.inf:
            raise ValueError(f"{section}.{name}={value}: must be at least {minimum}")


def require_positive(section: str, config: object, *names: str) -> None:
    """Raise ValueError for a field that is infinite or not above 0."""
    for name in names:
        if not 0 < (value := getattr(config, name)) < math.inf:
            raise ValueError(f"{section}.{name}={value}: must be above 0")
