"""Checkpoints made without torch: the same folders, with files of any content."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpointing.format.commit import checkpoint_name, seal, write_file
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.storage.backends import Storage
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import ResolvedTier, RunTiers

NONCE = "ab12cd34"
FILES = {".metadata": b"metadata", "__0_0.distcp": b"x" * 1000, "__1_0.distcp": b"y" * 500}


def make(
    storage: Storage,
    step: int,
    *,
    attempt: int = 1,
    nonce: str = NONCE,
    take: int = 1,
    files: Mapping[str, bytes] = FILES,
    fence: Callable[[], bool] = lambda: True,
    now: float = 1000.0,
    extra: dict[str, Any] | None = None,
) -> str:
    """Write and commit one checkpoint; returns its name."""
    name = checkpoint_name(step, attempt, nonce, take)
    entries = [write_file(storage, name, file, data) for file, data in files.items()]
    manifest = describe(name, step, attempt, nonce, entries)
    seal(storage, replace(manifest, extra=extra) if extra is not None else manifest, fence, now)
    return name


OWNER = Owner(1, NONCE, (), lambda: True)


def tier_at(root: Path | str, storage: Storage | None = None, **options: Any) -> ResolvedTier:
    return replace(RunTiers.single(root, storage).tiers[0], **options)


def describe(name: str, step: int, attempt: int, nonce: str, entries: list[FileEntry]) -> Manifest:
    return Manifest(
        name=name,
        step=step,
        attempt=attempt,
        nonce=nonce,
        created_at=1000.0,
        torch="2.13.0",
        world={"ranks": 2},
        files=tuple(entries),
        extra={"position": step * 8},
    )
