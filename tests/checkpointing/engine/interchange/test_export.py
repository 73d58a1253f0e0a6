"""Exports and imports: every bit, or nothing."""

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # torch complains once, when it is imported, that NumPy is not there; orch does not use it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpointing.engine.audit import sealed_checkpoint
from checkpointing.engine.audit.audit import audit_checkpoint
from checkpointing.engine.interchange import importer
from checkpointing.engine.interchange.exporter import (
    ExportedTensor,
    new_folder,
    open_for_export,
    write_safetensors,
    write_torch,
)
from checkpointing.engine.interchange.importer import (
    ImportedTensor,
    SafetensorsFiles,
    TorchTensors,
    flat,
    load_torch,
    open_safetensors,
    tensor_info,
    write_checkpoint,
)
from checkpointing.engine.state.fingerprints import fingerprint
from checkpointing.errors import CheckpointRefused
from checkpointing.format.commit import Name
from checkpointing.storage.backends import LocalStorage
from tests.checkpointing.engine.built_checkpoint import Built, build, columns, rows

DRAW = torch.Generator().manual_seed(4)
TENSORS = {
    "matrix": torch.randn(40, 33, generator=DRAW),
    "wide": torch.randn(24, 48, generator=DRAW),
    "half": torch.randn(17, generator=DRAW).to(torch.bfloat16),
    "one": torch.randn(1, 1, 9, generator=DRAW),
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 4),
    "mask": torch.randint(0, 2, (9,), generator=DRAW).to(torch.bool),
    "count": torch.randint(0, 1 << 40, (5, 2), generator=DRAW),
}
CUTS = {"matrix": rows((40, 33), 3), "wide": columns((24, 48), 2)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of this size pass through in several parts."""
    monkeypatch.setattr(sealed_checkpoint, "BLOCK", 512)


def made(root: Path, change: Any = None) -> Path:
    built = build(TENSORS, CUTS)
    if change:
        change(built)
    return built.write(root)


def wanted(tensors: Mapping[str, torch.Tensor] = TENSORS, dtype: torch.dtype | None = None) -> list[ExportedTensor]:
    return [
        ExportedTensor(key=key, name=f"m.{key}", dtype=dtype if dtype and t.dtype.is_floating_point else t.dtype)
        for key, t in tensors.items()
    ]


def all_of(source: importer.ExternalTensors, name: str) -> torch.Tensor:
    found = torch.empty(source.tensors[name].shape, dtype=getattr(torch, source.tensors[name].dtype))
    for block, offsets in source.blocks(name):
        part = found
        for dimension, (offset, size) in enumerate(zip(offsets, block.shape, strict=True)):
            part = part.narrow(dimension, offset, size)
        part.copy_(block)
    return found


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


@pytest.mark.parametrize("largest", [10**9, 3000])
def test_safetensors_hold_every_bit_of_a_sharded_checkpoint(tmp_path: Path, largest: int) -> None:
    folder = made(tmp_path / "run")
    with open_for_export(LocalStorage(folder.parent), folder.name) as source, new_folder(tmp_path / "out") as draft:
        done = write_safetensors(source, wanted(), draft, largest=largest)
    read = open_safetensors(tmp_path / "out")
    assert {name: fingerprint(TENSORS[name[2:]]) for name in read.tensors} == done.fingerprints
    assert all(same(all_of(read, f"m.{key}"), tensor) for key, tensor in TENSORS.items())
    assert done.compared == len(TENSORS)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == (1 if largest > 3000 else 3)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_several_files_have_an_index_as_hugging_face_reads_it(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    with open_for_export(LocalStorage(folder.parent), folder.name) as source, new_folder(tmp_path / "out") as draft:
        write_safetensors(source, wanted(), draft, largest=3000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, file in index["weight_map"].items():
        assert name in SafetensorsFiles([tmp_path / "out" / file]).tensors


def test_a_torch_file_is_one_that_torch_reads_with_weights_only(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")

    def nest(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {"model": {**tensors, "again": tensors["m.wide"]}, "step": 7, "extra": {"loss": None, "on": [1, "a"]}}

    with open_for_export(LocalStorage(folder.parent), folder.name) as source, new_folder(tmp_path / "out") as draft:
        write_torch(source, wanted(), draft, name="checkpoint.pt", nest=nest)
    read = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert all(same(read["model"][f"m.{key}"], tensor) for key, tensor in TENSORS.items())
    assert read["model"]["again"].data_ptr() == read["model"]["m.wide"].data_ptr()
    assert (read["step"], read["extra"]) == (7, {"loss": None, "on": [1, "a"]})


def test_conversion_rounds_as_torch_does_and_leaves_integers_alone(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    with open_for_export(LocalStorage(folder.parent), folder.name) as source, new_folder(tmp_path / "out") as draft:
        write_safetensors(source, wanted(dtype=torch.bfloat16), draft)
    read = open_safetensors(tmp_path / "out")
    assert same(all_of(read, "m.matrix"), TENSORS["matrix"].bfloat16())
    assert same(all_of(read, "m.count"), TENSORS["count"])


def flip(file: str, place: int) -> Any:
    def change(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[place] ^= 4
        (folder / file).write_bytes(bytes(data))

    return change


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "index.json", "fingerprints.json"])
def test_nothing_is_exported_of_a_checkpoint_with_a_flipped_bit(tmp_path: Path, file: str) -> None:
    folder = made(tmp_path / "run")
    flip(file, (folder / file).stat().st_size // 2)(folder)
    with pytest.raises(CheckpointRefused, match=r"digest"):
        _export(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def _export(folder: Path, out: Path) -> None:
    with open_for_export(LocalStorage(folder.parent), folder.name) as source, new_folder(out) as draft:
        write_safetensors(source, wanted(), draft)


def test_values_that_are_not_those_that_were_saved_are_refused(tmp_path: Path) -> None:
    def lie(built: Built) -> None:
        assert built.fingerprints is not None
        built.fingerprints["wide"] = "0" * 16

    folder = made(tmp_path / "run", lie)
    with pytest.raises(
        CheckpointRefused, match=r"wide has fingerprint .*, but fingerprints.json records 0000000000000000"
    ):
        _export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_with_a_hole_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def hole(built: Built) -> None:
        built.pieces(lambda piece: None if piece.key == "matrix" and piece.offsets[0] else piece)

    with pytest.raises(CheckpointRefused, match="its shards hold"):
        _export(made(tmp_path / "run", hole), tmp_path / "out")


def test_a_disk_that_gives_back_other_values_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "run")
    good = SafetensorsFiles.blocks

    def bad(self: SafetensorsFiles, name: str) -> Any:
        for block, offsets in good(self, name):
            yield block.flip(0) if name == "m.matrix" else block, offsets

    monkeypatch.setattr(SafetensorsFiles, "blocks", bad)
    with pytest.raises(OSError, match="the values of m.matrix read back"):
        _export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    folder, out = made(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(FileExistsError):
        _export(folder, out)
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    _export(folder, out)
    assert (out / "model.safetensors").exists()


# ---- the other way


def brought(tensors: Mapping[str, torch.Tensor]) -> dict[str, ImportedTensor]:
    source = TorchTensors(tensors)
    return {key: ImportedTensor(external=source, name=key, info=tensor_info(tensor)) for key, tensor in tensors.items()}


def imported(root: Path, tensors: dict[str, ImportedTensor]) -> Path:
    manifest = write_checkpoint(
        LocalStorage(root), Name(step=3, attempt=0, nonce="cd"), tensors, extra={"a": 1}, world={"ranks": 1}
    )
    return root / manifest.name


def test_an_imported_checkpoint_is_like_any_other(tmp_path: Path) -> None:
    folder = imported(tmp_path, brought(TENSORS))
    assert audit_checkpoint(LocalStorage(tmp_path), folder.name, 4).faults == ()
    with open_for_export(LocalStorage(tmp_path), folder.name) as source:
        assert source.fingerprints == {key: fingerprint(tensor) for key, tensor in TENSORS.items()}


def test_plain_dcp_and_its_converter_read_it_bit_for_bit(tmp_path: Path) -> None:
    folder = imported(tmp_path, brought(TENSORS))
    blank = {key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(blank, checkpoint_id=str(folder))
        dcp_to_torch_save(folder, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert all(same(blank[key], tensor) and same(plain[key], tensor) for key, tensor in TENSORS.items())


def test_missing_rows_are_zeros_and_types_are_converted(tmp_path: Path) -> None:
    source = TorchTensors({"w": TENSORS["matrix"].bfloat16()})
    target = tensor_info(torch.empty(64, 33))
    folder = imported(tmp_path, {"w": ImportedTensor(external=source, name="w", info=target)})
    with open_for_export(LocalStorage(tmp_path), folder.name) as found:
        values = torch.cat([block for block, _ in found.blocks("w")])
    assert same(values[:40], TENSORS["matrix"].bfloat16().float())
    assert not values[40:].any()


def test_a_source_that_changed_since_its_export_is_refused_before_the_commit(tmp_path: Path) -> None:
    tensors = brought(TENSORS)
    tensors["wide"] = ImportedTensor(
        external=tensors["wide"].external, name="wide", info=tensors["wide"].info, expected_fingerprint="0" * 16
    )
    with pytest.raises(CheckpointRefused, match="wide: its values have fingerprint"):
        imported(tmp_path, tensors)
    assert not list(tmp_path.glob("*/COMMIT"))


class Evil:
    def __reduce__(self) -> Any:
        return (open, ("/nonexistent/pwned", "w"))


def test_no_code_in_a_torch_file_is_run(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "evil": Evil()}, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointRefused, match=r"a\.pt: holds a pickled object \(_?io\.open\): save model\.state_dict\(\) instead"
    ):
        load_torch(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointRefused, match="is not a torch or safetensors file"):
        load_torch(tmp_path / "b.pt")


def _cut(path: Path) -> None:
    torch.save({"w": torch.ones(64)}, path)
    path.write_bytes(path.read_bytes()[:200])


NO_TENSORS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_text("hello, these are no weights"), "is not a torch or safetensors file"),
    (lambda path: path.touch(), "is not a torch or safetensors file"),
    (lambda path: torch.save(torch.nn.Linear(2, 2), path), "a pickled object (torch.nn.modules.linear.Linear): save "),
    (lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), "is in torch's old file format"),
    (lambda path: path.write_bytes(b"\2\0\0\0\0\0\0\0{}"), "its name must end in .safetensors"),
    (_cut, "is damaged, truncated, or not a torch file"),
]


@pytest.mark.parametrize(("write", "why"), NO_TENSORS)
def test_a_file_that_is_no_torch_file_is_refused_with_its_own_message(
    tmp_path: Path, write: Callable[[Path], object], why: str
) -> None:
    write(tmp_path / "file.pt")
    with pytest.raises(CheckpointRefused) as caught:
        load_torch(tmp_path / "file.pt")
    assert caught.value.reason.startswith(why) or why in caught.value.reason
    assert "weights_only" not in caught.value.reason


def test_nested_dicts_are_named_by_their_path() -> None:
    value = {"a": {"b": torch.ones(1), 0: {"c": torch.zeros(2)}}, "n": 3}
    assert flat(value).keys() == {"a/b", "a/0/c"}


@pytest.mark.parametrize(
    ("index", "reported"),
    [
        ({"weight_map": {"w": "gone.safetensors"}}, "lists missing files: gone"),
        ({"weight_map": {"w": "../secret"}}, "is outside the folder"),
        ({"weight_map": {"lost": "model.safetensors"}}, "lists lost, which is in no file"),
        ({"weights": {}}, "is malformed"),
    ],
)
def test_an_index_that_names_missing_tensors_is_refused(tmp_path: Path, index: Any, reported: str) -> None:
    folder = made(tmp_path / "run")
    _export(folder, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointRefused, match=reported):
        open_safetensors(tmp_path / "out")
