"""Names, and the order of a commit: data first, marker last."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import FencedOff, ManifestError
from checkpointing.format.commit import (
    DELETED,
    Commit,
    Region,
    assign_places,
    checkpoint_name,
    file_name,
    fresh_name,
    join_regions,
    parse_name,
    read_commit,
    seal,
)
from checkpointing.format.manifest import FileEntry, parse
from checkpointing.retention.garbage import decide_debris, delete, delete_debris, find_debris
from checkpointing.retention.policy import Policy, select_expired
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import CHUNK, digest, filled_digest
from checkpointing.storage.durable import canonical
from checkpointing.tiers.catalog import Catalog
from checkpointing.verification.verify import verify
from tests.checkpointing.fake_storages import Faulty, Recording, replay
from tests.checkpointing.made_checkpoint import NONCE, make


@given(st.integers(0, 10**12), st.integers(1, 10**5), st.from_regex(r"[0-9a-f]{8}", fullmatch=True), st.integers(1, 9))
def test_names_read_back(step: int, attempt: int, nonce: str, take: int) -> None:
    name = checkpoint_name(step, attempt, nonce, take)
    parts = parse_name(name)
    assert parts is not None
    assert (parts.step, parts.attempt, parts.nonce, parts.take) == (step, attempt, nonce, take)
    assert str(parts) == name


def test_the_name_is_the_documented_one() -> None:
    assert checkpoint_name(500, 1, "ab12cd34") == "step-00000500.001-ab12cd34"
    assert checkpoint_name(500, 1, "ab12cd34", 2) == "step-00000500.001-ab12cd34-2"


@pytest.mark.parametrize(
    "name",
    ["", "latest", "step-5.001-ab", "step-00000500.1-ab12cd34", "step-000000500.001-ab12cd34", "step-00000500.001-AB",
     "step-00000500.001-ab12cd34-1", "step-00000500.001-ab12cd34.tmp", "xstep-00000500.001-ab12cd34"],
)  # fmt: skip
def test_names_of_other_folders_are_not_parsed(name: str) -> None:
    assert parse_name(name) is None


def test_a_step_saved_again_gets_a_folder_of_its_own() -> None:
    first = checkpoint_name(5, 1, NONCE)
    second = fresh_name(5, 1, NONCE, [first])
    assert second == checkpoint_name(5, 1, NONCE, 2)
    assert fresh_name(5, 1, NONCE, [first, second]) == checkpoint_name(5, 1, NONCE, 3)
    assert fresh_name(6, 1, NONCE, [first]) == checkpoint_name(6, 1, NONCE)
    assert fresh_name(5, 1, NONCE, [], first=2) == checkpoint_name(5, 1, NONCE, 2)
    assert fresh_name(5, 1, NONCE, [second], first=2) == checkpoint_name(5, 1, NONCE, 3)


def test_data_is_on_disk_before_the_marker_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    true_fsync, true_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        shown = f"{path.name.split('.')[1]}.tmp" if path.suffix == ".tmp" else path.relative_to(tmp_path)
        calls.append(f"fsync {shown}")
        assert path.is_dir() or path.stat().st_size > 0, "an unflushed file was synced"
        true_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        calls.append(f"rename to {Path(target).name}")
        true_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    name = make(LocalStorage(tmp_path), 5, files={".metadata": b"m", "__0_0.distcp": b"data"})
    assert calls == [
        "fsync .",  # the new folder's own name
        f"fsync {name}/.metadata",
        f"fsync {name}",
        f"fsync {name}/__0_0.distcp",
        f"fsync {name}",
        "fsync manifest.tmp",
        "rename to manifest.json",
        f"fsync {name}",
        "fsync COMMIT.tmp",
        "rename to COMMIT",
        f"fsync {name}",
    ]


@pytest.mark.parametrize("power_loss", [False, True], ids=["crash", "power-loss"])
def test_every_prefix_of_a_save_and_its_deletion_shows_whole_checkpoints(tmp_path: Path, power_loss: bool) -> None:
    storage = Recording(tmp_path / "real")
    history: list[tuple[int, set[str]]] = []  # length of the log, and what is committed from there on

    def note() -> None:
        history.append((len(storage.log), {entry.name for entry in Catalog(storage.root).committed_entries()}))

    note()
    for step in (1, 2, 3):
        make(storage, step)
        note()
    for entry, _ in select_expired(Catalog(storage.root).committed_entries(), Policy(keep=2)):
        delete(storage, entry.name, lambda: True)
    note()
    states = [names for _, names in history]
    for length in range(len(storage.log) + 1):
        root = tmp_path / f"at-{length}"
        root.mkdir()
        replay(storage.log[:length], root, power_loss=power_loss)
        found = Catalog(root).committed_entries()
        assert {entry.name for entry in found} in states, f"after {length} operations"
        assert all(verify(entry.path, 2).ok for entry in found), f"after {length} operations"
        floor = min(2, max((len(names) for at, names in history if at <= length), default=0))
        assert len(found) >= floor, f"after {length} operations something committed is lost"
        _assert_the_next_collector_tidies(root, {entry.name for entry in found}, f"after {length} operations")


def _assert_the_next_collector_tidies(root: Path, committed: set[str], when: str) -> None:
    """The owner's next start deletes all debris; another attempt's start only finishes deletions."""
    catalog = Catalog(root)
    stranger = decide_debris(find_debris(catalog), owner=(9, "99999999"))
    begun = {verdict.folder.name for verdict in stranger if verdict.collect}
    assert begun == {verdict.folder.name for verdict in stranger if (root / verdict.folder.name / DELETED).exists()}, (
        when
    )
    delete_debris(catalog.storage, decide_debris(find_debris(catalog), owner=(1, NONCE)), lambda: True)
    assert {path.name for path in root.iterdir()} == committed, when
    assert all(verify(root / name, 2).ok for name in committed), when


def test_there_is_no_commit_without_the_fence(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with pytest.raises(FencedOff, match="launch token of this attempt was revoked"):
        make(storage, 5, fence=lambda: False)
    assert Catalog(tmp_path).committed_entries() == []


def test_the_fence_is_checked_last(tmp_path: Path) -> None:
    storage = Recording(tmp_path)
    make(storage, 5, fence=lambda: not storage.log.append(("fence", "")))
    assert [entry[0] for entry in storage.log[-2:]] == ["fence", "publish"]
    assert storage.log[-3][:2] == ("publish", f"{checkpoint_name(5, 1, NONCE)}/manifest.json")


def test_sealing_again_with_the_same_manifest_changes_nothing(tmp_path: Path) -> None:
    storage = Recording(tmp_path)
    name = make(storage, 5, now=1000.0)
    manifest = parse((tmp_path / name / "manifest.json").read_bytes())
    first = read_commit(storage, name)
    storage.log.clear()
    assert seal(storage, manifest, lambda: True, 2000.0) == first
    assert storage.log == [], "a second node leader in the same folder"
    with pytest.raises(FileExistsError, match="already committed with a different manifest"):
        seal(storage, replace(manifest, extra={"position": 7}), lambda: True, 2000.0)
    assert read_commit(storage, name) == first
    assert verify(tmp_path / name, 2).ok


def test_a_checkpoint_being_deleted_is_not_sealed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 5)
    manifest = parse((tmp_path / name / "manifest.json").read_bytes())
    (tmp_path / name / DELETED).write_text("")
    with pytest.raises(FileExistsError, match="half-deleted"):
        seal(storage, manifest, lambda: True, 1000.0)


def test_a_seal_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 5)
    manifest = parse((tmp_path / name / "manifest.json").read_bytes())
    (tmp_path / name / "COMMIT").unlink()
    (tmp_path / name / "manifest.json").write_bytes(b"torn")
    seal(storage, manifest, lambda: True, 1000.0)
    assert verify(tmp_path / name, 2).ok


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "publish"])
def test_no_failed_operation_leaves_a_checkpoint(tmp_path: Path, operation: str) -> None:
    published = ("manifest.json", "COMMIT")
    for file in (".metadata", "__1_0.distcp", *published):
        root = tmp_path / file
        storage = Faulty(root, lambda op, _, file=file: errno.EIO if op.startswith(operation) and file in op else 0)
        if (operation == "publish") != (file in published):
            continue
        with pytest.raises(OSError, match="Input/output error"):
            make(storage, 5)
        assert Catalog(root).committed_entries() == []


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"schema":"orch.commit/1"}', b"\x00" * 90])
def test_a_damaged_commit_is_reported_as_damaged(tmp_path: Path, data: bytes) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 5)
    (tmp_path / name / "COMMIT").write_bytes(data)
    with pytest.raises(ManifestError, match="COMMIT is damaged"):
        read_commit(storage, name)


def test_a_commit_in_another_form_is_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    path = tmp_path / make(storage, 5) / "COMMIT"
    fields = json.loads(path.read_bytes())
    for written in (
        json.dumps(fields, indent=1).encode(),
        canonical({**fields, "size": fields["size"] + 1}),
        Commit(manifest="no digest", size=1, committed_at=1.0).encode(),
    ):
        path.write_bytes(written)
        with pytest.raises(ManifestError, match="it is not in canonical form"):
            read_commit(storage, path.parent.name)


def region(name: str, data: bytes, file: str, at: int) -> Region:
    rest = data[len(data) - len(data) % CHUNK :]
    filled = filled_digest(rest) if rest else digest(data[-CHUNK:])
    return Region.from_entry(FileEntry.from_bytes(name, data), filled, {name: (file, at)})


def test_ranks_of_a_node_follow_each_other_from_multiples_of_a_chunk_on() -> None:
    sizes = [{"r0": 1, "r0b": CHUNK}, {"r1": CHUNK + 1}, {"r2": 5}, {}, {"r4": 3}]
    found = assign_places(sizes, [True, False, True, False, False])
    assert found == [
        {"r0": ("__node0.distcp", 0), "r0b": ("__node0.distcp", CHUNK)},
        {"r1": ("__node0.distcp", 2 * CHUNK)},
        {"r2": ("__node1.distcp", 0)},
        {},
        {"r4": ("__node1.distcp", CHUNK)},
    ]
    assert assign_places([{"a": 1}], [False]) == [{"a": (file_name(0), 0)}], "the first rank always begins a file"


def test_the_digests_of_a_nodes_file_are_those_of_its_bytes() -> None:
    first, second, last = b"a" * (CHUNK + 5), b"b" * CHUNK, b"c" * 7
    whole = first + bytes(CHUNK - 5) + second + last
    file = file_name(0)
    regions = [
        region("r0", first, file, 0), region("r1", second, file, 2 * CHUNK), region("r2", last, file, 3 * CHUNK),
    ]  # fmt: skip
    other = region("r3", b"d", file_name(1), 0)
    found = sorted(join_regions([regions[2], other, regions[0], regions[1]]), key=lambda one: one.name)
    assert found == [FileEntry.from_bytes(file, whole), FileEntry.from_bytes(file_name(1), b"d")]


def test_regions_that_leave_a_gap_or_have_other_chunks_are_refused() -> None:
    file = file_name(0)
    first = region("r0", b"a", file, 0)
    with pytest.raises(ValueError, match=r"^__node0.distcp: r1 does not begin where the region before it ends$"):
        join_regions([first, region("r1", b"b", file, 2 * CHUNK)])
    odd = replace(
        region("r1", b"b", file, CHUNK), entry=FileEntry(name="r1", size=1, chunks=("0" * 32,), chunk_size=64)
    )
    with pytest.raises(ValueError, match="r1 does not begin"):
        join_regions([first, odd])
