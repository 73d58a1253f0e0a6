"""Seeded damage to a committed checkpoint: every region of every file, and whole files lost or replaced."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from checkpointing.format.manifest import COMMIT, INDEX, MANIFEST, parse_index

T = TypeVar("T")

PAGE = 4096


@dataclass(frozen=True)
class Region:
    """Some bytes of one file, and their role there."""

    file: str
    what: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.what} of {self.file}"


def regions(folder: Path) -> list[Region]:
    """Every byte of every file in one region: heads, values, tails and padding of the shards, small files whole."""
    pieces = parse_index((folder / INDEX).read_bytes()).pieces
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix != ".distcp":
            found.append(Region(path.name, "text", 0, path.stat().st_size))
            continue
        at = 0
        for piece in sorted((piece for piece in pieces if piece.file == path.name), key=lambda piece: piece.start):
            end = piece.start + piece.length
            found.append(Region(path.name, "padding", at, piece.start))
            found.append(Region(path.name, "head", piece.start, piece.data))
            found.append(Region(path.name, "values", piece.data, piece.data + piece.nbytes))
            found.append(Region(path.name, "tail", piece.data + piece.nbytes, end))
            at = end
        found.append(Region(path.name, "padding", at, path.stat().st_size))
    return [region for region in found if region.end > region.start]


@dataclass(frozen=True)
class Damage:
    """What was done, in words, and which kind of damage it is."""

    kind: str
    text: str


Fault = Callable[[Path, Path, random.Random, int], str]
"""Damages the first folder; the second is an older, healthy checkpoint. The number goes through the regions in turn."""


def damage(folder: Path, older: Path, seed: int) -> Damage:
    """Do the damage of this seed: seeds iterate over the kinds, and the seeds of one kind over the regions."""
    fault = FAULTS[seed % len(FAULTS)]
    text = fault(folder, older, random.Random(seed), seed // len(FAULTS))
    return Damage(fault.__name__.replace("_", " "), text)


def flipped_bit(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    return _flip(folder, _in_turn(regions(folder), number), draw)


def flipped_bit_of_a_small_file(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    return _flip(folder, _in_turn([region for region in regions(folder) if region.what == "text"], number), draw)


def flipped_bit_of_values(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    return _flip(folder, _in_turn([region for region in regions(folder) if region.what == "values"], number), draw)


def flipped_bit_between_values(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    around = [region for region in regions(folder) if region.what in ("head", "tail", "padding")]
    return _flip(folder, _in_turn(around, number), draw)


def _flip(folder: Path, region: Region, draw: random.Random) -> str:
    path = folder / region.file
    data = bytearray(path.read_bytes())
    at, bit = draw.randrange(region.start, region.end), draw.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at}, {region}"


def zeroed_page(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    shards = [path for path in sorted(folder.glob("*.distcp")) if any(path.read_bytes())]
    path = _in_turn(shards, number)
    data = bytearray(path.read_bytes())
    pages = [at for at in range(0, len(data), PAGE) if any(data[at : at + PAGE])]
    at = draw.choice(pages)
    length = len(data[at : at + PAGE])
    data[at : at + length] = bytes(length)
    path.write_bytes(data)
    return f"page at {at} of {path.name}"


def zeroed_file(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    path = _in_turn(_files(folder), number)
    path.write_bytes(bytes(path.stat().st_size))
    return path.name


def truncation(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    path = _in_turn(_files(folder), number)
    size = draw.randrange(path.stat().st_size)
    with path.open("r+b") as stream:
        stream.truncate(size)
    return f"{path.name} cut to {size}"


def growth(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    path = _in_turn(_files(folder), number)
    with path.open("ab") as stream:
        stream.write(draw.randbytes(draw.randrange(1, 5000)))
    return f"{path.name} grew"


def missing(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    # Without COMMIT it was never there: that is no damage that a reader could see.
    path = _in_turn([path for path in _files(folder) if path.name != COMMIT], number)
    path.unlink()
    return path.name


def renamed(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    path = _in_turn([path for path in _files(folder) if path.name != COMMIT], number)
    path.rename(path.with_name(draw.choice(["__7_0.distcp", path.name + ".1", path.name.upper() + "_"])))
    return path.name


def duplicated(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    first, second = draw.sample([path for path in _files(folder) if path.name != COMMIT], 2)
    shutil.copyfile(first, second)
    return f"{second.name} is a copy of {first.name}"


def duplicated_shard(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    first, second = draw.sample(sorted(folder.glob("*.distcp")), 2)
    shutil.copyfile(first, second)
    return f"{second.name} is a copy of {first.name}"


def swapped(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    first, second = draw.sample([path for path in _files(folder) if path.name != COMMIT], 2)
    _swap(first, second)
    return f"{first.name} and {second.name}"


def swapped_shards(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    first, second = draw.sample(sorted(folder.glob("*.distcp")), 2)
    _swap(first, second)
    return f"{first.name} and {second.name}"


def stale_file(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    # Files that both steps have alike (`.metadata`, `index.json`) cannot be stale.
    changed = [path for path in _files(folder) if path.read_bytes() != (older / path.name).read_bytes()]
    path = _in_turn(changed, number)
    shutil.copyfile(older / path.name, path)
    return f"{path.name} of an older step"


def stale_shards(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    for path in folder.glob("*.distcp"):
        shutil.copyfile(older / path.name, path)
    return "every shard of an older step"


def old_manifest_with_new_data(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    shutil.copyfile(older / MANIFEST, folder / MANIFEST)
    if number % 2:
        shutil.copyfile(older / COMMIT, folder / COMMIT)
    return f"{MANIFEST} of an older step{', COMMIT too' if number % 2 else ''}"


def older_one_under_this_name(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    shutil.rmtree(folder)
    shutil.copytree(older, folder)
    return "a whole older checkpoint under the newer one's name"


def torn_marker(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    path = folder / _in_turn([COMMIT, MANIFEST], number)
    data = path.read_bytes()
    path.write_bytes(draw.choice([b"", data[: len(data) // 2], bytes(len(data)), b"null", data + data]))
    return f"{path.name} torn"


def lost_write(folder: Path, older: Path, draw: random.Random, number: int) -> str:
    """Some sectors keep what an older file had there: a disk that lied about a flush."""
    path = _in_turn(sorted(folder.glob("*.distcp")), number)
    data, old = bytearray(path.read_bytes()), (older / path.name).read_bytes()
    differing = [at for at in range(0, len(data), 512) if data[at : at + 512] != old[at : at + 512]]
    at = draw.choice(differing)
    data[at : at + 512] = old[at : at + 512]
    path.write_bytes(data)
    return f"sector at {at} of {path.name} is an older step's"


def _swap(first: Path, second: Path) -> None:
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _in_turn(choices: list[T], number: int) -> T:
    return choices[number % len(choices)]


FAULTS: tuple[Fault, ...] = (
    flipped_bit, flipped_bit_of_a_small_file, flipped_bit_of_values, flipped_bit_between_values, zeroed_page,
    zeroed_file, truncation, growth, missing, renamed, duplicated, duplicated_shard, swapped, swapped_shards,
    stale_file, stale_shards, old_manifest_with_new_data, older_one_under_this_name, torn_marker, lost_write,
)  # fmt: skip
