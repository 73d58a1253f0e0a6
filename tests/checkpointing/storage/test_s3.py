"""Checkpoints in an object store, with a real client over a real socket."""

import errno
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing.format.manifest import parse
from checkpointing.retention.garbage import decide_debris, delete, delete_debris, find_debris
from checkpointing.retention.policy import Policy, TierRetention
from checkpointing.storage.backends import FsspecStorage, LocalStorage, open_storage
from checkpointing.tiers.catalog import Catalog
from checkpointing.tiers.copy_files import CopyOrder, copy_file, copy_files
from checkpointing.verification.verify import verify_checkpoint
from tests.checkpointing.made_checkpoint import FILES, OWNER, make, tier_at


@pytest.fixture
def store(s3_url: str) -> FsspecStorage:
    storage = open_storage(s3_url)
    assert isinstance(storage, FsspecStorage)
    return storage


@pytest.fixture
def requests(store: FsspecStorage) -> Iterator[list[str]]:
    """The requests to the server, one line each."""
    seen: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    log, handler = logging.getLogger("werkzeug"), Lines()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield seen
    log.removeHandler(handler)
    log.setLevel(before)


def test_a_checkpoint_is_saved_found_and_verified(store: FsspecStorage, s3_url: str) -> None:
    older, name = make(store, 10), make(store, 20, extra={"loss": 0.5})
    found = Catalog(s3_url).committed_entries()
    assert [entry.name for entry in found] == [name, older]
    assert found[0].place == f"{s3_url}/{name}"
    assert found[0].bytes == sum(map(len, FILES.values()))
    assert verify_checkpoint(store, name, 2).ok


def test_damage_in_the_store_is_found(store: FsspecStorage) -> None:
    name = make(store, 10)
    store.publish(f"{name}/__0_0.distcp", b"x" * 999 + b"y")
    report = verify_checkpoint(store, name, 2)
    assert [str(fault) for fault in report.faults] == ["__0_0.distcp chunk 0: digest differs"]


def test_a_checkpoint_goes_there_and_back(store: FsspecStorage, s3_url: str, tmp_path: Path) -> None:
    """Local disk -> store -> another disk: the copy equals the original."""
    start, end = LocalStorage(tmp_path / "start"), LocalStorage(tmp_path / "end")
    big = {**FILES, "__2_0.distcp": bytes(range(256)) * (9 << 12)}
    name = make(start, 10, files=big)
    manifest = parse((tmp_path / "start" / name / "manifest.json").read_bytes())
    out = CopyOrder(source=str(tmp_path / "start"), target=s3_url, folder=name, files=manifest.files)
    assert copy_files(out).bytes == manifest.size
    assert copy_files(out).bytes == 0, "all files are there already"
    back = CopyOrder(source=s3_url, target=str(tmp_path / "end"), folder=name, files=manifest.files)
    assert copy_files(back).bytes == manifest.size
    for entry in manifest.files:
        assert (tmp_path / "end" / name / entry.name).read_bytes() == big[entry.name]
    assert store.list(name).keys() == end.list(name).keys() == set(big)


def test_a_half_sent_file_is_replaced(store: FsspecStorage, tmp_path: Path) -> None:
    start = LocalStorage(tmp_path)
    name = make(start, 10)
    manifest = parse((tmp_path / name / "manifest.json").read_bytes())
    store.publish(f"{name}/__0_0.distcp", b"half")
    entry = manifest.file("__0_0.distcp")
    assert entry is not None
    assert copy_file(start, store, name, entry) == entry.size
    assert store.list(name) == {"__0_0.distcp": entry.size}


def test_retention_and_debris_work_there(store: FsspecStorage, s3_url: str) -> None:
    names = [make(store, step) for step in (1, 2, 3, 4)]
    (half,) = [make(store, 5)]
    store.delete(f"{half}/COMMIT")
    place = tier_at(s3_url, store)
    reported: list[tuple[str, dict[str, Any]]] = []
    TierRetention(place, Policy(keep=2), OWNER, lambda kind, data: reported.append((kind, data))).apply(names[-1])
    assert [entry.step for entry in place.catalog.committed_entries()] == [4, 3]
    assert sorted(store.list("")) == names[2:]
    assert [data["tier"] for _, data in reported] == [s3_url] * 2


def test_a_deletion_that_was_cut_short_is_no_checkpoint_and_is_finished(store: FsspecStorage, s3_url: str) -> None:
    catalog = Catalog(s3_url, store)
    for answers in (0, 1, 2, len(FILES) + 2):
        name = make(store, 10 + answers)
        left = [True] * answers
        assert not delete(store, name, lambda left=left: bool(left) and left.pop())
        assert catalog.is_committed(name) == (answers == 0)
    delete_debris(store, decide_debris(find_debris(catalog)), lambda: True)
    assert [entry.step for entry in catalog.committed_entries()] == [10]
    assert len(store.list("")) == 1


def test_nothing_is_renamed_or_copied_and_a_marker_is_one_put(store: FsspecStorage, requests: list[str]) -> None:
    name = make(store, 10)
    delete(store, name, lambda: True)
    assert requests
    changes = [line for line in requests if "PUT" in line or "POST" in line]
    assert len([line for line in changes if "/COMMIT" in line]) == 1
    assert len(changes) == len(FILES) + 3, "each file, the manifest, COMMIT, the tombstone: one request each"
    assert not [line for line in requests if "copy" in line.lower()]


def test_an_open_reads_no_more_than_it_is_asked_for(store: FsspecStorage, requests: list[str]) -> None:
    sink = store.create("a/file")
    sink.write(bytes(1 << 20))
    sink.close()
    requests.clear()
    with store.open("a/file") as stream:
        stream.seek(1 << 19)
        assert len(stream.read(4096)) == 4096
    assert len([line for line in requests if "GET" in line]) == 1


def test_an_aborted_file_does_not_come_into_being(store: FsspecStorage) -> None:
    sink = store.create("a/file")
    sink.write(b"half")
    sink.abort()
    del sink
    assert store.list("a") == {}


def test_a_store_that_cannot_be_reached_is_an_oserror(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        # Fewer tries than by default: only the last error is of interest here.
        client = fsspec.filesystem(
            "s3", endpoint_url=address, config_kwargs={"retries": {"max_attempts": 1}}, skip_instance_cache=True
        )
        client.retries = 1
        storage = FsspecStorage(client, "bucket/run")
        with pytest.raises(OSError, match="Could not connect") as caught:
            storage.publish("a/COMMIT", b"seal")
        assert caught.value.errno == errno.EIO
        with pytest.raises(OSError, match="Could not connect"):
            storage.list("a")
