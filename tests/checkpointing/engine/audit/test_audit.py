"""Levels 3 and 4: a sound checkpoint has no fault; every inconsistency and impossible value is found and named."""

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.checkpointing.engine.built_checkpoint import Built, build, columns, rows  # isort: skip  # first: it imports torch quietly

import torch

from checkpointing.engine.audit import audit as audit_module
from checkpointing.engine.audit import sealed_checkpoint
from checkpointing.engine.audit.audit import (
    AuditShare,
    TensorExpectations,
    audit_checkpoint,
    merge_reports,
    structure_faults,
)
from checkpointing.format.manifest import Index, Piece, TensorInfo
from checkpointing.storage.backends import LocalStorage
from checkpointing.verification.verify import Report, _resident
from tests.checkpointing.engine.conftest import Bench
from tests.checkpointing.verification.test_verify import drop_cache

STEP = 5


def state() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "model/wide": torch.randn(12, 8, generator=draw),
        "model/tall": torch.randn(40, 6, generator=draw).to(torch.bfloat16),
        "model/flat": torch.randn(1, 30, generator=draw),
        "model/none": torch.empty(0, 4),
        "model/mask": torch.tensor([True, False, True]),
        "optimizer/wide/step": torch.tensor(float(STEP)),
        "rng/rank-00000": torch.arange(64, dtype=torch.uint8),
    }


@pytest.fixture
def built() -> Built:
    return build(state(), {"model/wide": columns((12, 8), 2), "model/tall": rows((40, 6), 3)})


def audit(path: Path, level: int = 3, expected: TensorExpectations | None = None) -> Report:
    return audit_checkpoint(
        LocalStorage(path.parent), path.name, level, None, (lambda _: expected) if expected else None
    )


def reasons(report: Report) -> list[str]:
    assert report.ok == (not report.faults)
    return [str(fault) for fault in report.faults]


@pytest.mark.parametrize("level", [3, 4])
def test_a_sound_checkpoint_has_no_faults(built: Built, tmp_path: Path, level: int) -> None:
    assert reasons(audit(built.write(tmp_path), level)) == []


def test_a_shard_passes_in_parts_where_memory_is_small(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_checkpoint, "BLOCK", 40)
    assert reasons(audit(built.write(tmp_path), 4)) == []


def test_missing_fingerprints_are_noted(built: Built, tmp_path: Path) -> None:
    built.fingerprints = None
    report = audit(built.write(tmp_path), 4)
    assert (reasons(report), report.notes) == ([], ("no fingerprints.json: fingerprints were not checked",))


def test_damaged_bytes_are_the_only_reported_fault(built: Built, tmp_path: Path) -> None:
    path = built.write(tmp_path)
    data = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(data[:800] + bytes([data[800] ^ 1]) + data[801:])
    (fault,) = audit(path, 4).faults
    assert (fault.chunk, fault.reason) == (0, "digest differs")
    assert "model/wide" in fault.tensors


def test_an_unlisted_file_is_named(built: Built, tmp_path: Path) -> None:
    path = built.write(tmp_path)
    (path / "notes.txt").write_text("hello")
    assert reasons(audit(path)) == ["notes.txt: is not listed in manifest.json"]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("memory", [1 << 40, 0])
def test_files_stay_in_the_page_cache_from_one_reading_to_the_next_if_there_is_room(
    disk: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, memory: int
) -> None:
    path = build({"model/large": torch.rand(3 << 20)}).write(disk)
    looked = []

    def resident() -> set[bool]:
        with (path / "__0_0.distcp").open("rb") as stream:
            return {_resident(stream.fileno(), place) for place in range(0, 12 << 20, 1 << 20)}

    def structure(*arguments: Any, **named: Any) -> Any:
        looked.append(resident())
        return structure_faults(*arguments, **named)

    monkeypatch.setattr(audit_module, "structure_faults", structure)
    monkeypatch.setattr(audit_module, "_available", lambda: memory)
    drop_cache(path / "__0_0.distcp")
    if cached:
        (path / "__0_0.distcp").read_bytes()
    assert audit(path, 3).ok
    # What the kernel was still reading ahead cannot be let go of: a page or two may stay.
    assert (looked == [{True}]) == (cached or memory > 0)
    assert resident() == {cached}


def test_checkpoints_of_the_engine_are_sound(bench: Bench) -> None:
    bench.saved(3, 4)
    path = bench.folder(4)
    report = audit(path, 4, TensorExpectations(required=("model.half",)))
    assert (reasons(report), report.notes) == ([], ())


# -- level 3: what describes the tensors


def hole(piece: Piece) -> Piece | None:
    return None if (piece.key, piece.offsets) == ("model/tall", (14, 0)) else piece


def overlap(piece: Piece) -> Piece:
    return replace(piece, offsets=(0, 3)) if (piece.key, piece.offsets) == ("model/wide", (0, 4)) else piece


def short(piece: Piece) -> Piece:
    return replace(piece, nbytes=piece.nbytes // 2) if piece.key == "model/mask" else piece


def beyond(piece: Piece) -> Piece:
    return replace(piece, length=1 << 30) if piece.key == "rng/rank-00000" else piece


def elsewhere(piece: Piece) -> Piece:
    return replace(piece, file="__9_0.distcp") if piece.key == "model/flat" else piece


def misplaced(piece: Piece) -> Piece:
    return replace(piece, data=piece.data + 4) if piece.key == "model/flat" else piece


@pytest.mark.parametrize(
    ("lie", "key", "words"),
    [
        (hole, "model/tall", "its shards hold 156 of 240 values"),
        (overlap, "model/wide", "the shards at (0, 0) and (0, 3) overlap"),
        (beyond, "rng/rank-00000", "a shard occupies bytes"),
        (elsewhere, "model/flat", "is not listed in manifest.json, but holds shards"),
        (misplaced, "model/flat", "the frame at"),
    ],
)
def test_a_wrong_index_is_found(
    built: Built, tmp_path: Path, lie: Callable[[Piece], Piece | None], key: str, words: str
) -> None:
    built.pieces(lie)
    found = [fault for fault in audit(built.write(tmp_path)).faults if fault.tensors == (key,)]
    assert any(words in fault.reason for fault in found), found


def test_a_shard_with_too_few_bytes_is_found(built: Built, tmp_path: Path) -> None:
    # One that the index itself would not refuse: half the rows of a shard, with bytes for half.
    info = TensorInfo("float32", (12, 8))
    built.index = Index(
        {**built.index.tensors, "model/wide": replace(info, dtype="float64")},
        built.index.pieces,
    )
    found = [fault.reason for fault in audit(built.write(tmp_path)).faults if fault.file.startswith("__")]
    assert "the shard at (0, 0) has 192 bytes for (12, 4) of float64" in found


def test_metadata_and_index_must_agree(built: Built, tmp_path: Path) -> None:
    del built.metadata.state_dict_metadata["model/mask"]
    place = next(at for at in built.metadata.storage_data if at.fqn == "model/flat")
    info = built.metadata.storage_data[place]
    built.metadata.storage_data[place] = replace(info, offset=info.offset + 1)
    found = reasons(audit(built.write(tmp_path)))
    assert ".metadata: model/flat has its shard at (0, 0) in a different place than in index.json (model/flat)" in found
    assert any(text.startswith(".metadata: model/mask is absent in it, bool (3,) in index.json") for text in found)


def test_a_frame_of_another_tensor_is_found(built: Built, tmp_path: Path) -> None:
    """Bytes, index and `.metadata` agree, but plain torch.load would return another shape than they say."""
    other = build({**state(), "model/flat": state()["model/flat"].view(30, 1)})
    sound = build(state())
    sound.files = other.files
    found = [fault for fault in audit(sound.write(tmp_path)).faults if fault.tensors == ("model/flat",)]
    assert "(30, 1)" in found[0].reason


class Counting(LocalStorage):
    """Counts the requests for a file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []

    def open(self, path: str) -> BinaryIO:
        stream, reads = super().open(path), self.reads

        class Counted(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                reads.append(path.rpartition("/")[2])
                return super().read(size)

        with stream:
            return Counted(stream.read())


def test_frames_are_read_by_whole_chunks(tmp_path: Path) -> None:
    """A request for every header of every tensor would be tens of thousands of them."""
    path = build({f"model/{number}": torch.ones(3) for number in range(50)}).write(tmp_path)
    storage = Counting(tmp_path)
    assert audit_checkpoint(storage, path.name, 3).ok
    assert storage.reads.count("__0_0.distcp") == 2, "once for its digest, once for its frames"


def test_code_in_metadata_is_refused_and_not_run(built: Built, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("run",))

    built.metadata.planner_data = Evil()
    (text,) = reasons(audit(built.write(tmp_path)))
    assert text.startswith(".metadata: .metadata requests builtins.print")
    assert pickle.dumps(built.metadata)


# -- level 4: values


def test_values_that_are_not_those_of_the_save_are_found(tmp_path: Path) -> None:
    built = build(state())
    changed = {**state(), "model/tall": state()["model/tall"].flip(0)}
    built.files = build(changed).files
    (fault,) = audit(built.write(tmp_path), 4).faults
    assert fault.tensors == ("model/tall",)
    assert fault.reason.startswith("fingerprint is")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_nan_in_what_trains_is_counted_and_named(tmp_path: Path, kind: torch.dtype) -> None:
    tensors = state()
    tensors["model/tall"] = tensors["model/tall"].to(kind)
    tensors["model/tall"].view(-1)[100:102] = float("nan")
    built = build(tensors, {"model/tall": rows((40, 6), 4)})
    expected = TensorExpectations(trained=lambda index: [key for key in index.tensors if key.startswith("model/")])
    (fault,) = audit(built.write(tmp_path), 4, expected).faults
    assert (fault.file, fault.tensors) == ("__1_0.distcp", ("model/tall",))
    assert fault.reason == "2 values are NaN in a trained tensor"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nan_in_what_does_not_train_and_infinities_anywhere_are_only_noted(tmp_path: Path, value: float) -> None:
    """Programs mask with them: in buffers, in frozen parameters, and in those that train."""
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), value)
    bias = torch.zeros(4).masked_fill(torch.arange(4) > 2, float("-inf"))
    tensors = {**state(), "model/frozen": mask, "model/bias": bias}
    report = audit(build(tensors).write(tmp_path), 4, TensorExpectations(trained=lambda index: ["model/bias"]))
    assert reasons(report) == []
    assert set(report.notes) == {
        "model/frozen: 6 values are NaN or infinite", "model/bias: 1 values are NaN or infinite",
    }  # fmt: skip


@pytest.mark.parametrize("weights", [[], [0], [0, 0, 5, 0, 0], [7, 1, 0], [1] * 10, [1, 90, 1]])
@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_every_item_has_one_reader(weights: list[int], size: int) -> None:
    items = list(enumerate(weights))
    taken = [AuditShare(rank, size).take(items, lambda item: item[1]) for rank in range(size)]
    assert [item for share in taken for item in share] == items


@pytest.mark.parametrize("size", [2, 3, 20])
def test_readers_divide_a_checkpoint_and_find_the_same(
    built: Built, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = built.write(tmp_path)
    whole = audit(path, 4)
    parts = [
        audit_checkpoint(LocalStorage(tmp_path), path.name, 4, share=AuditShare(rank, size)) for rank in range(size)
    ]
    assert merge_reports(parts).bytes == whole.bytes, "every byte is read once"
    assert max(part.bytes for part in parts) < whole.bytes
    assert reasons(merge_reports(parts)) == []
    file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    parts = [
        audit_checkpoint(LocalStorage(tmp_path), path.name, 4, share=AuditShare(rank, size)) for rank in range(size)
    ]
    merged = merge_reports(parts)
    assert (merged.faults[0].file, merged.faults[0].reason) == (file.name, "digest differs")


def test_a_tensor_without_a_fingerprint_is_a_fault(built: Built, tmp_path: Path) -> None:
    assert built.fingerprints is not None
    del built.fingerprints["model/mask"]
    built.fingerprints["model/gone"] = "0" * 16
    found = {fault.tensors: fault.reason for fault in audit(built.write(tmp_path), 4).faults}
    assert found[("model/mask",)].endswith("but was None when saved")
    assert "no such tensor exists" in found[("model/gone",)]


def test_missing_and_unexpected_tensors_are_found(built: Built, tmp_path: Path) -> None:
    expected = TensorExpectations(
        required=("rng/rank-00000", "rng/rank-00001"),
        readable={"rng/": lambda key, tensor: f"{key} has {len(tensor)} bytes"},
    )
    assert reasons(audit(built.write(tmp_path), 4, expected)) == [
        "index.json: missing tensor rng/rank-00001 (rng/rank-00001)",
        "__0_0.distcp chunk 0: rng/rank-00000 has 64 bytes (rng/rank-00000)",
    ]


def test_an_unknown_level_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="level 2"):
        audit_checkpoint(LocalStorage(tmp_path), "step-00000005.001-ab12cd34", 2)
