"""Damaged and malicious checkpoints are refused before anything in them is unpickled; an older one is loaded."""

import io
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from checkpointing.config import CheckpointConfig, StagingConfig
from checkpointing.engine.audit.audit import audit_checkpoint
from checkpointing.engine.restore.metadata_reader import AllowList, read_metadata
from checkpointing.engine.restore.restorer import Candidate
from checkpointing.errors import CheckpointRefused, NothingVerifies, UnsafePickle
from checkpointing.format.commit import Commit
from checkpointing.format.manifest import INDEX, FileEntry, Manifest, parse
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import CHUNK, digest
from checkpointing.verification.verify import verify
from tests.checkpointing.engine.conftest import Bench, blank, loaded, same, state
from tests.checkpointing.proofs.faults import FAULTS, damage

CANARY: list[str] = []


class Canary:
    """Sets off the alarm when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return CANARY.append, ("unpickled",)


class _Watch:
    """An audit hook cannot be removed: there is one, and it counts only while active."""

    def __init__(self) -> None:
        self.found: list[str] | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.found is not None and event == "pickle.find_class":
            self.found.append(".".join(map(str, arguments)))


@pytest.fixture(scope="session")
def watch() -> _Watch:
    return _Watch()


@contextmanager
def nothing_unpickled(watch: _Watch, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails when any byte below `folder` reached an unpickler; other checkpoints may be read."""
    reached: list[str] = []
    true_load, true_init = torch.load, AllowList.__init__
    names = {digest(file.read_bytes()): file.name for file in folder.iterdir() if file.is_file()}

    def load(stream: Any, **options: Any) -> Any:
        reached.append("torch.load")
        return true_load(stream, **options)

    def init(self: AllowList, data: bytes, name: str) -> None:
        if name == folder.name:
            reached.append(names.get(digest(data), "bytes from nowhere"))
        true_init(self, data, name)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", load)
        patch.setattr(AllowList, "__init__", init)
        yield
    assert reached == []


# ---- one fault at a time


def malicious_metadata(folder: Path) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(Canary()))
    return "malicious .metadata"


def malicious_shard(folder: Path) -> str:
    stream = io.BytesIO()
    torch.save({"x": Canary()}, stream)
    (folder / "__0_0.distcp").write_bytes(stream.getvalue())
    return "malicious shard"


MALICIOUS = (malicious_metadata, malicious_shard)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two committed checkpoints, of steps 1 and 2, whose two shards have the same names and sizes."""
    bench = Bench(tmp_path_factory.mktemp("healthy"))
    bench.saved(1, 2, config=CheckpointConfig(staging=StagingConfig(files=2))).close()
    return bench.root


@pytest.mark.parametrize("number", range(2 * len(FAULTS) + len(MALICIOUS)))
def test_damage_is_refused_before_unpickling_and_the_older_checkpoint_is_loaded(
    bench: Bench, healthy: Path, number: int, watch: _Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(healthy, bench.root, dirs_exist_ok=True)
    folder = bench.folder(2)
    if number < len(MALICIOUS):
        what = MALICIOUS[number](folder)
    else:
        what = str(damage(folder, bench.folder(1), number - len(MALICIOUS)))
    assert not verify(folder, 2).ok, what
    made, target = bench.checkpointer(), blank()
    with monkeypatch.context() as patch:
        only = [Candidate(2, folder.name, 0)]
        patch.setattr("checkpointing.engine.restore.restorer.Restorer._candidates", lambda self: (only, []))
        watch.found = []
        with nothing_unpickled(watch, folder, monkeypatch), pytest.raises(NothingVerifies):
            made.restore(target)
        found, watch.found = watch.found, None
    assert found == [], f"{what}: something was unpickled"
    assert all(not tensor.any() for tensor in target.values()), what
    assert loaded(made.restore(target)).step == 1
    assert same(target, state(1))
    assert CANARY == []
    refusal = bench.reported("checkpoint.refused")[-1]
    assert (refusal["step"], refusal["name"]) == (2, folder.name)
    assert refusal["reason"], what


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(1000))
def test_a_thousand_faults(bench: Bench, healthy: Path, seed: int) -> None:
    shutil.copytree(healthy, bench.root, dirs_exist_ok=True)
    what = damage(bench.folder(2), bench.folder(1), 1000 + seed)  # other seeds than those of proofs/test_corruption.py
    target = blank()
    assert loaded(bench.checkpointer().restore(target)).step == 1, what
    assert same(target, state(1)), what


def test_healthy_checkpoints_are_never_refused(bench: Bench) -> None:
    for step in range(1, 21):
        target = blank()
        assert loaded(bench.saved(step).restore(target)).step == step
        assert same(target, state(step))
    assert bench.reported("checkpoint.refused") == []


def test_only_damaged_checkpoints_are_not_a_fresh_start(bench: Bench) -> None:
    bench.saved(1, 2)
    for step in (1, 2):
        (bench.folder(step) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(NothingVerifies) as raised:
        bench.checkpointer().restore(blank())
    assert [refusal.name for refusal in raised.value.refusals] == [bench.folder(2).name, bench.folder(1).name]
    assert "__0_0.distcp: has 0 bytes" in str(raised.value)


# ---- `.metadata` in a checkpoint that an attacker has sealed again: a restore does not read it, an audit runs no code


def resealed(folder: Path, metadata: bytes) -> None:
    """Replace `.metadata` and redo every digest, as an attacker with write access could."""
    (folder / ".metadata").write_bytes(metadata)
    old = parse((folder / "manifest.json").read_bytes())
    entry = FileEntry.from_bytes(".metadata", metadata)
    seal_manifest(folder, replace(old, files=(entry, *(file for file in old.files if file.name != ".metadata"))))


def seal_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / "manifest.json").write_bytes(manifest.encode())
    commit = Commit(manifest=digest(manifest.encode()), size=manifest.size, committed_at=1.0)
    (folder / "COMMIT").write_bytes(commit.encode())


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def with_bytes_item(folder: Path) -> bytes:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    return pickle.dumps(metadata)


def with_foreign_file(folder: Path) -> bytes:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../../../../etc/passwd"
    return pickle.dumps(metadata)


def with_a_hole(folder: Path) -> bytes:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size([63, 33])
    return pickle.dumps(metadata)


def with_a_wrong_place(folder: Path) -> bytes:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset += 10**9
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda folder: pickle.dumps(Canary()), "requests"),
        (lambda folder: pickle.dumps(_Calls(print, "x")), "requests builtins.print"),
        (lambda folder: pickle.dumps(_Calls(eval, "1")), "requests builtins.eval"),
        (lambda folder: pickle.dumps(torch.load), "requests torch.serialization.load"),
        (lambda folder: b"cos\nsystem\n(S'true'\ntR.", "requests os.system"),
        (lambda folder: b"ctorch\nload\n.", "requests torch.load"),
        (lambda folder: pickle.dumps({"state_dict_metadata": {}}), "does not describe a checkpoint"),
        (lambda folder: b"\x80\x04.", "malformed"),
        (with_bytes_item, "BytesStorageMetadata"),
        (with_foreign_file, "model.weight has its shard at (0, 0) in a different place than in index.json"),
        (with_a_hole, "model.weight has its shard at (0, 0) in a different place than in index.json"),
        (with_a_wrong_place, "model.weight has its shard at (0, 0) in a different place than in index.json"),
    ],
)
def test_malicious_code_under_a_valid_seal_is_not_run(bench: Bench, made: Callable[[Path], bytes], reason: str) -> None:
    bench.saved(1)
    resealed(bench.folder(1), made(bench.folder(1)))
    assert verify(bench.folder(1), 2).ok, "the seal itself is in order"
    report = audit_checkpoint(LocalStorage(bench.root), bench.folder(1).name, 3)
    assert [str(fault) for fault in report.faults if reason in fault.reason], report.faults
    target = blank()
    loaded(bench.checkpointer().restore(target))
    assert same(target, state(1))
    assert CANARY == []


def test_a_checkpoint_without_its_index_is_refused(bench: Bench) -> None:
    bench.saved(1)
    folder = bench.folder(1)
    old = parse((folder / "manifest.json").read_bytes())
    seal_manifest(folder, replace(old, files=tuple(file for file in old.files if file.name != INDEX)))
    with pytest.raises(NothingVerifies, match=r"index\.json is not listed in manifest\.json"):
        bench.checkpointer().restore(blank())


class Rotting(LocalStorage):
    """A disk that returns correct bytes for some reads, and wrong ones from then on."""

    def __init__(self, root: Path, good: int) -> None:
        super().__init__(root)
        self.good, self.opened = good, 0

    def open(self, path: str) -> Any:
        if not path.endswith(".distcp"):
            return super().open(path)
        self.opened += 1
        data = bytearray((self.root / path).read_bytes())
        data[len(data) // 2] ^= self.opened > self.good
        return io.BytesIO(data)


def test_bytes_that_rot_between_check_and_read_are_caught(bench: Bench) -> None:
    """Verification succeeds, then the disk returns other bytes to the reader."""
    bench.saved(1, 2)
    assert verify(bench.folder(2), 2).ok
    target = blank()
    storage = Rotting(bench.root, good=0)
    with pytest.raises(NothingVerifies) as raised:
        bench.checkpointer(storage=storage).restore(target)
    assert [refusal.reason for refusal in raised.value.refusals] == ["__0_0.distcp chunk 0: digest differs"] * 2
    assert all(not tensor.any() for tensor in target.values())


def test_verified_bytes_are_the_delivered_ones(bench: Bench) -> None:
    """No byte is read a second time."""
    bench.saved(1)
    target, storage = blank(), Rotting(bench.root, good=1)
    loaded(bench.checkpointer(storage=storage).restore(target))
    assert storage.opened == 1
    assert same(target, state(1))


def test_large_tensors_cross_chunks(bench: Bench) -> None:
    big = torch.arange(3 * CHUNK // 4, dtype=torch.int32)
    made = bench.checkpointer()
    made.save(1, {"a": torch.ones(3), "big": big, "z": torch.ones(5)}, {})
    target = {"a": torch.zeros(3), "big": torch.zeros_like(big), "z": torch.zeros(5)}
    made.restore(target)
    assert torch.equal(target["big"], big)
    assert torch.equal(target["z"], torch.ones(5))
    shard = parse((bench.folder(1) / "manifest.json").read_bytes()).file("__0_0.distcp")
    assert shard is not None
    assert len(shard.chunks) == 4


@pytest.mark.parametrize("chunk", range(4))
def test_whichever_chunk_is_bad_no_tensor_changes(bench: Bench, chunk: int) -> None:
    made = bench.checkpointer()
    made.save(1, {"a": torch.ones(3), "big": torch.ones(3 * CHUNK // 4), "z": torch.ones(5)}, {})
    made.wait()
    with (bench.folder(1) / "__0_0.distcp").open("r+b") as stream:
        stream.seek((chunk + 1) * CHUNK - 1 if chunk < 3 else -1, 0 if chunk < 3 else 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 4]))
    target = {"a": torch.zeros(3), "big": torch.zeros(3 * CHUNK // 4), "z": torch.zeros(5)}
    with pytest.raises(NothingVerifies, match=f"__0_0.distcp chunk {chunk}: digest differs"):
        bench.checkpointer().restore(target)
    assert all(not tensor.any() for tensor in target.values())


def test_the_allow_list_covers_what_dcp_writes_and_nothing_else_of_torch(bench: Bench) -> None:
    bench.saved(1)
    manifest = parse((bench.folder(1) / "manifest.json").read_bytes())
    metadata = read_metadata(LocalStorage(bench.root), manifest)
    assert set(metadata.state_dict_metadata) == set(state(1))
    for name in ("load", "compile", "_C", "Tensor", "nonsense"):
        with pytest.raises(UnsafePickle):
            AllowList(b"", "x").find_class("torch", name)
    with pytest.raises(CheckpointRefused):
        AllowList(b"", "x").find_class("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")
