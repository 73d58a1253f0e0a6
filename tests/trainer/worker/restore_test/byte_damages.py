"""Damage done by disks, tiers and faulty writers.

Each changes the first folder; the second is the checkpoint before it.
"""

import random
from collections.abc import Callable
from pathlib import Path

from tests.trainer.worker.restore_test.damages import read_all, save_anew


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def change(path: Path, act: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    before = bytes(data)
    act(data)
    assert data != before
    path.write_bytes(data)


def flipped_bit(folder: Path, older: Path, draw: random.Random) -> None:
    def flip(data: bytearray) -> None:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)

    change(draw.choice(shards(folder)), flip)


def truncated(folder: Path, older: Path, draw: random.Random) -> None:
    change(draw.choice(shards(folder)), lambda data: data.__delitem__(slice(draw.randrange(1, len(data)), None)))


def zeroed_page(folder: Path, older: Path, draw: random.Random) -> None:
    def zero(data: bytearray) -> None:
        starts = [at for at in range(0, len(data), 4096) if any(data[at : at + 4096])]
        at = draw.choice(starts)
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))

    change(draw.choice(shards(folder)), zero)


def shard_of_older(folder: Path, older: Path, draw: random.Random) -> None:
    at = draw.randrange(len(shards(folder)))
    shards(folder)[at].write_bytes(shards(older)[at].read_bytes())


def swapped_metadata(folder: Path, older: Path, draw: random.Random) -> None:
    (folder / "fingerprints.json").write_bytes((older / "fingerprints.json").read_bytes())


def missing_file(folder: Path, older: Path, draw: random.Random) -> None:
    draw.choice([*shards(folder), folder / ".metadata", folder / "index.json"]).unlink()


def stale_tensors(folder: Path, older: Path, draw: random.Random) -> None:
    state, extra, world = read_all(folder)
    old, _, _ = read_all(older)
    keys = [key for key in old if key.startswith("model/") and old[key].shape == state[key].shape]
    save_anew(folder, {**state, **{key: old[key] for key in keys}}, extra, world)


def generators_of_older(folder: Path, older: Path, draw: random.Random) -> None:
    state, extra, world = read_all(folder)
    old, _, _ = read_all(older)
    save_anew(folder, {**state, "rng/rank-00000": old["rng/rank-00000"]}, extra, world)


def torn_generators(folder: Path, older: Path, draw: random.Random) -> None:
    state, extra, world = read_all(folder)
    torn = state["rng/rank-00000"].clone()
    torn[0] = 7
    save_anew(folder, {**state, "rng/rank-00000": torn}, extra, world)


def stray_file(folder: Path, older: Path, draw: random.Random) -> None:
    (folder / "__9_0.distcp").write_bytes(shards(older)[0].read_bytes())


BYTE_DAMAGES = (
    flipped_bit, truncated, zeroed_page, shard_of_older, swapped_metadata, missing_file, stale_tensors,
    generators_of_older, torn_generators, stray_file,
)  # fmt: skip
"""Each makes a checkpoint of any run CORRUPT or SUSPECT."""
