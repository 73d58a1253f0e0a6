"""Checkpoints that are wrong in ways their own digests do not show, as a faulty program would save them.

Each kind takes a seed, which chooses the tensor, the bit or the rank.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.config import CheckpointConfig
from checkpointing.engine.audit.sealed_checkpoint import SealedCheckpoint
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.engine.restore.metadata_reader import read_index
from checkpointing.format.commit import Commit, parse_name, read_commit
from checkpointing.format.manifest import COMMIT, MANIFEST, parse
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import digest
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import RunTiers
from checkpointing.verification.verify import read_sealed

State = dict[str, Tensor]


def read_all(folder: Path) -> tuple[State, dict[str, Any], dict[str, Any]]:
    storage = LocalStorage(folder.parent)
    manifest, faults = read_sealed(storage, folder.name)
    assert manifest is not None, faults
    with SealedCheckpoint(storage, manifest, read_index(storage, manifest)) as sealed:
        state = {key: sealed.read_tensor(key) for key in sealed.index.tensors}
    return state, dict(manifest.extra), dict(manifest.world)


def save_anew(folder: Path, state: State, extra: dict[str, Any], world: dict[str, Any]) -> None:
    """Write a checkpoint of this name that is sound in itself."""
    parts = parse_name(folder.name)
    assert parts is not None
    shutil.rmtree(folder)
    facts = {key: value for key, value in world.items() if key != "ranks"}
    made = Checkpointer(
        Owner(parts.attempt, parts.nonce, (), lambda: True), World(facts=facts),
        RunTiers.single(folder.parent, keep=100), lambda kind, data: None,
        config=CheckpointConfig(keep=100, plausibility="off"),
    )  # fmt: skip
    own = {key: value for key, value in extra.items() if key != "rank_state"}
    ranks = extra.get("rank_state")
    try:
        made.prepare(state)
        assert made.save(parts.step, state, own, ranks[0] if ranks else None)
        made.wait()
        assert made.committed_step == parts.step, made.failure
    finally:
        made.close()
    _set_ranks(folder, world)


def _set_ranks(folder: Path, world: dict[str, Any]) -> None:
    """Record the original world, because only one rank wrote the checkpoint."""
    manifest = parse((folder / MANIFEST).read_bytes())
    if manifest.world.get("ranks") == world.get("ranks"):
        return
    data = replace(manifest, world={**manifest.world, "ranks": world["ranks"]}).encode()
    before = read_commit(LocalStorage(folder.parent), folder.name)
    (folder / MANIFEST).write_bytes(data)
    commit = Commit(manifest=digest(data), size=before.size, committed_at=before.committed_at)
    (folder / COMMIT).write_bytes(commit.encode())


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def change_bytes(folder: Path, seed: int, act: Callable[[bytearray], None]) -> None:
    path = shards(folder)[seed % len(shards(folder))]
    data = bytearray(path.read_bytes())
    before = bytes(data)
    act(data)
    assert data != before
    path.write_bytes(data)


def flipped_bit(folder: Path, older: Path, seed: int) -> None:
    def flip(data: bytearray) -> None:
        data[random.Random(seed).randrange(len(data))] ^= 1 << seed % 8

    change_bytes(folder, seed, flip)


def truncated(folder: Path, older: Path, seed: int) -> None:
    draw = random.Random(seed)
    change_bytes(folder, seed, lambda data: data.__delitem__(slice(draw.randrange(1, len(data)), None)))


def zeroed_page(folder: Path, older: Path, seed: int) -> None:
    def zero(data: bytearray) -> None:
        at = random.Random(seed).choice([at for at in range(0, len(data), 4096) if any(data[at : at + 4096])])
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))

    change_bytes(folder, seed, zero)


def missing_shard(folder: Path, older: Path, seed: int) -> None:
    shards(folder)[seed % len(shards(folder))].unlink()


def missing_index(folder: Path, older: Path, seed: int) -> None:
    (folder / ("index.json" if seed % 2 else ".metadata")).unlink()


def shard_of_older(folder: Path, older: Path, seed: int) -> None:
    at = seed % len(shards(folder))
    shards(folder)[at].write_bytes(shards(older)[at].read_bytes())


def stray_file(folder: Path, older: Path, seed: int) -> None:
    (folder / "__9_0.distcp").write_bytes(shards(older)[0].read_bytes())


def other_fingerprints(folder: Path, older: Path, seed: int) -> None:
    (folder / "fingerprints.json").write_bytes((older / "fingerprints.json").read_bytes())


def torn_generators(folder: Path, older: Path, seed: int) -> None:
    """A state that no generator accepts."""

    def changed(state: State) -> State:
        torn = state["rng/rank-00000"].clone()
        torn[0] = 7
        return {"rng/rank-00000": torn}

    _change(folder, changed)


def stale_weights(folder: Path, older: Path, seed: int) -> None:
    old, _, _ = read_all(older)
    names = sorted(key for key in old if key.startswith("model/"))
    layer = "" if seed % 2 else "layers.0."
    _change(folder, lambda state: {key: old[key] for key in names if layer in key})


def other_optimizer(folder: Path, older: Path, seed: int) -> None:
    old, _, _ = read_all(older)
    ends = ("exp_avg", "exp_avg_sq") if seed % 2 else ("exp_avg", "exp_avg_sq", "step")
    _change(folder, lambda state: {key: old[key] for key in old if key.startswith("optimizer/") and key.endswith(ends)})


def wrong_position(folder: Path, older: Path, seed: int) -> None:
    state, extra, world = read_all(folder)
    save_anew(folder, state, {**extra, "consumed": extra["consumed"] + (seed + 1) * (-8 if seed % 2 else 8)}, world)


def swapped_generators(folder: Path, older: Path, seed: int) -> None:
    if seed % 2:
        old, _, _ = read_all(older)
        _change(folder, lambda state: {key: old[key] for key in old if key.startswith("rng/")})
        return
    pair = ("rng/rank-00000", "rng/rank-00001")
    _change(folder, lambda state: {one: state[other] for one, other in zip(pair, reversed(pair), strict=True)})


def nan_weights(folder: Path, older: Path, seed: int) -> None:
    """Damage a weight of a layer, since steps may read no token of a damaged row of the embedding."""

    def changed(state: State) -> State:
        key = _pick(state, seed, lambda key, tensor: key.startswith("model/") and "embedding" not in key)
        value = state[key].clone()
        value.view(-1)[seed % value.numel()] = float("nan") if seed % 2 else float("inf")
        return {key: value}

    _change(folder, changed)


def other_config(folder: Path, older: Path, seed: int) -> None:
    state, extra, world = read_all(folder)
    save_anew(folder, state, {**extra, "config_digest": digest(str(seed).encode()) * 2}, world)


def remade_manifest(folder: Path, older: Path, seed: int) -> None:
    """Damage values under matching fingerprints, digests and COMMIT."""

    def changed(state: State) -> State:
        key = _pick(state, seed, lambda key, tensor: key.startswith("model/"))
        value = state[key].clone()
        value.view(-1)[seed % value.numel()] += 1.0
        return {key: value}

    _change(folder, changed)


def transposed(folder: Path, older: Path, seed: int) -> None:
    """Transpose a square matrix, which leaves every sum over it unchanged."""

    def changed(state: State) -> State:
        def square(key: str, tensor: Tensor) -> bool:
            return key.startswith("model/") and tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]

        key = _pick(state, seed, square)
        return {key: state[key].t().contiguous()}

    _change(folder, changed)


def _pick(state: State, seed: int, fits: Callable[[str, Tensor], bool]) -> str:
    return random.Random(seed).choice(sorted(key for key, tensor in state.items() if fits(key, tensor)))


def _change(folder: Path, changed: Callable[[State], State]) -> None:
    state, extra, world = read_all(folder)
    new = changed(state)
    assert any(
        not torch.equal(new[key].view(torch.uint8), state[key].view(torch.uint8)) for key in new if new[key].ndim
    )
    save_anew(folder, {**state, **new}, extra, world)


Damage = Callable[[Path, Path, int], None]

IN_ANY_RUN: tuple[Damage, ...] = (
    flipped_bit, truncated, zeroed_page, missing_shard, missing_index, shard_of_older, stray_file, other_fingerprints,
    torn_generators, stale_weights, swapped_generators,
)  # fmt: skip
DAMAGES = (*IN_ANY_RUN, other_optimizer, wrong_position, nan_weights, other_config, remade_manifest, transposed)
"""Each damages the first folder; the second is the healthy checkpoint before it."""
