"""The configuration of `tiny-gpt` for runs below a folder: composed once, because that takes longer than most tests."""

import os
import pickle
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.config.compose import compose


def tiny_config(root: Path, *overrides: str) -> dict[str, Any]:
    """Return the composed values with `cluster.root`, the caller's own."""
    data: dict[str, Any] = pickle.loads(_composed(overrides, os.environ["PATH"]))
    data["cluster"]["root"] = str(root)
    return data


@cache
def _composed(overrides: tuple[str, ...], path: str) -> bytes:
    """Compose with the schedulers that are found in `path`."""
    return pickle.dumps(compose("tiny-gpt", overrides).data)
