"""Two checkpoints tensor by tensor: numbers, order, what is not read, what cannot be compared."""

import math
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.checkpointing.engine.built_checkpoint import Built, build, columns, rows  # isort: skip  # first: it imports torch quietly

import torch

from checkpointing.engine.audit import diff as differ
from checkpointing.engine.audit.diff import compare
from checkpointing.engine.audit.sealed_checkpoint import SealedCheckpoint
from checkpointing.errors import CheckpointRefused
from checkpointing.storage.backends import LocalStorage
from checkpointing.verification.verdicts import TensorDiff

WIDE = torch.arange(96, dtype=torch.float32).view(12, 8) + 1


class TrainedKeys(LocalStorage):
    """Records which files were opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def open(self, path: str) -> BinaryIO:
        self.opened.append(path.rpartition("/")[2])
        return super().open(path)


def differences(tmp_path: Path, first: Built, second: Built) -> dict[str, TensorDiff]:
    sides = []
    for name, built in (("first", first), ("second", second)):
        path = built.write(tmp_path / name)
        sides.append(SealedCheckpoint.open(LocalStorage(path.parent), path.name))
    return {item.key: item for item in compare(*sides)}


def changed(tensor: torch.Tensor, place: int, value: float) -> torch.Tensor:
    other = tensor.clone()
    other.view(-1)[place] = value
    return other


@pytest.mark.parametrize("fingerprints", [True, False])
def test_equal_values_are_equal_however_they_are_spread(tmp_path: Path, fingerprints: bool) -> None:
    first = build({"w": WIDE, "s": torch.tensor(3.0), "none": torch.empty(0, 3)}, {"w": rows((12, 8), 4)})
    second = build({"w": WIDE, "s": torch.tensor(3.0), "none": torch.empty(0, 3)}, {"w": columns((12, 8), 3)})
    if not fingerprints:
        first.fingerprints = None
    found = differences(tmp_path, first, second)
    assert all(item.equal and (item.largest, item.relative, item.changed) == (0, 0, 0) for item in found.values())
    assert {item.by_fingerprint for item in found.values()} == {fingerprints}


@pytest.mark.parametrize("block", [32, 1 << 26])
def test_numbers_that_describe_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(differ, "BLOCK", block)  # rows one by one, and all at once
    other = changed(changed(WIDE, 0, -2.0), 95, 100.0)
    boxes = {"w": rows((12, 8), 5)}, {"w": columns((12, 8), 2)}
    item = differences(tmp_path, build({"w": WIDE}, boxes[0]), build({"w": other}, boxes[1]))["w"]
    assert not item.equal
    assert item.largest == 4.0
    assert item.changed == 2 / 96
    assert item.relative == pytest.approx(5.0 / float(other.double().norm()))


def test_tensors_are_compared_by_their_bits(tmp_path: Path) -> None:
    special = torch.tensor([math.nan, math.inf, 0.0, 1.0])
    same = differences(tmp_path / "a", build({"w": special}), build({"w": special.clone()}))["w"]
    assert same.equal
    zero = differences(tmp_path / "b", build({"w": special}), build({"w": changed(special, 2, -0.0)}))["w"]
    assert (zero.equal, zero.largest, zero.changed) == (False, 0.0, 0.25)
    lost = differences(tmp_path / "c", build({"w": special}), build({"w": changed(special, 3, math.nan)}))["w"]
    assert lost.changed == 0.25
    assert math.isnan(lost.largest or 0.0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.complex64])
def test_every_kind_of_number_is_compared(tmp_path: Path, kind: torch.dtype) -> None:
    first = torch.tensor([1.0, 2.0, 3.0]).to(kind)
    second = torch.tensor([1.0, 2.0, 7.0]).to(kind)
    item = differences(tmp_path, build({"w": first}), build({"w": second}))["w"]
    assert item.largest == 4.0
    assert item.changed == pytest.approx(1 / 3)


def test_incomparable_tensors_come_first_and_others_by_difference(tmp_path: Path) -> None:
    first = build({"a": WIDE, "b": WIDE, "c": WIDE, "d": WIDE, "e": WIDE, "only": WIDE})
    second = build(
        {
            "a": WIDE,
            "b": WIDE + 1,
            "c": WIDE * 2,
            "d": WIDE.double(),
            "e": WIDE.view(8, 12),
            "new": WIDE,
        }
    )
    found = differences(tmp_path, first, second)
    assert list(found) == ["d", "e", "new", "only", "c", "b", "a"]
    assert [key for key, item in found.items() if not item.comparable] == ["d", "e", "new", "only"]
    assert (found["only"].second, found["new"].first) == (None, None)


def test_tensors_with_equal_fingerprints_are_not_read(tmp_path: Path) -> None:
    boxes = {"w": [((0, 0), (12, 8))], "v": rows((12, 8), 2)}
    paths = [
        build({"w": WIDE, "v": v}, boxes).write(tmp_path / name)
        for name, v in (("first", WIDE), ("second", changed(WIDE, 90, 0)))
    ]
    storages = [TrainedKeys(path.parent) for path in paths]
    sides = [SealedCheckpoint.open(storage, path.name) for storage, path in zip(storages, paths, strict=True)]
    for storage in storages:
        storage.opened.clear()
    reported: list[tuple[int, int]] = []
    items = {item.key: item for item in compare(*sides, lambda done, total: reported.append((done, total)))}
    assert items["w"].equal
    assert items["v"].changed == 1 / 96
    assert reported[-1] == (WIDE.nbytes, WIDE.nbytes)
    assert set(storages[0].opened) == {"__0_0.distcp", "__1_0.distcp"}
    equal = SealedCheckpoint.open(TrainedKeys(paths[0].parent), paths[0].name)
    storages[0].opened.clear()
    compare(sides[0], equal)
    assert storages[0].opened == []


def test_damaged_bytes_are_never_compared(tmp_path: Path) -> None:
    built = build({"w": WIDE})
    built.fingerprints = None
    paths = [built.write(tmp_path / name) for name in ("first", "second")]
    with (paths[1] / "__0_0.distcp").open("r+b") as stream:
        stream.seek(800)
        stream.write(b"\x7f")
    sides = [SealedCheckpoint.open(LocalStorage(path.parent), path.name) for path in paths]
    with pytest.raises(CheckpointRefused, match="digest differs"):
        compare(*sides)


def test_an_uncommitted_checkpoint_is_not_opened(tmp_path: Path) -> None:
    path = build({"w": WIDE}).write(tmp_path)
    (path / "COMMIT").unlink()
    with pytest.raises(CheckpointRefused, match="COMMIT"):
        SealedCheckpoint.open(LocalStorage(tmp_path), path.name)
