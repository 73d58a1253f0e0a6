"""Reads a checkpoint with a malicious pickle in every file, under an audit hook; prints what happened as JSON.

    untrusted_program.py FOLDER STEP: every STEP-th combination of payload, file and seal.

An audit hook cannot be taken away, and a payload that ran could do anything: so this is a process of its own.
"""

import contextlib
import copyreg
import gc
import json
import os
import shutil
import sys
import warnings
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from checkpointing.engine.audit.audit import AUDITS, audit_checkpoint
from checkpointing.engine.collectives.group import FAILURES
from checkpointing.engine.restore.restorer import RestoreOptions
from checkpointing.errors import CheckpointError
from checkpointing.format.commit import Commit
from checkpointing.format.manifest import COMMIT, MANIFEST, METADATA, FileEntry, Manifest, parse
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import digest
from checkpointing.verification.verify import LEVELS, verify_checkpoint
from tests.checkpointing.proofs.gadgets import Payload, inside_metadata, plain, wrapped
from tests.checkpointing.proofs.world import World, fresh_copy, marked, plain_load, same, state

SHARD = "__0_0.distcp"
SEALS = ("as found", "sealed again")

_DCP = "torch.distributed.checkpoint"
ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"), ("torch", "Size"), ("builtins", "getattr"),
}  # fmt: skip
WATCHED = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "os.startfile", "subprocess.",
    "exec", "compile", "code.", "marshal.", "socket.", "ctypes.dlopen", "ctypes.dlsym", "urllib.",
    "http.", "ftplib.", "smtplib.",
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.truncate", "shutil.",
    "tempfile.", "webbrowser.", "sys.settrace", "sys.setprofile", "pty.", "import", "open", "pickle.find_class",
)  # fmt: skip


class Watch:
    """Records what a correct read would not do, while `on`."""

    def __init__(self) -> None:
        self.on, self.seen, self.usual = False, [], set()  # type: list[str], set[str]
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or not event.startswith(WATCHED):
            return
        if event == "pickle.find_class" and (arguments[0], arguments[1]) in ALLOWED | _dtypes():
            return
        if event == "import" and arguments[0] in sys.modules:
            return
        if event == "open" and not _writes(arguments):
            return
        self.on = False  # what follows is our own
        self.seen.append(f"{event} {arguments!r}"[:300])
        self.on = True


def _dtypes() -> set[tuple[str, str]]:
    return {("torch", name) for name in ("float32", "float64", "bfloat16", "bool", "uint8", "int64")}


def _writes(arguments: tuple[Any, ...]) -> bool:
    _path, mode, flags = arguments
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def seal_again(folder: Path) -> None:
    """Make manifest and COMMIT match the folder's contents, as an attacker with write access could."""
    path = folder / MANIFEST
    try:
        manifest: Manifest | None = parse(path.read_bytes())
    except CheckpointError:
        manifest = None
    if manifest is not None:
        new = replace(manifest, files=tuple(described(folder, entry.name) for entry in manifest.files))
        path.write_bytes(new.encode())
    size = 1 if manifest is None else new.size
    commit = Commit(manifest=digest(path.read_bytes()), size=size, committed_at=1.0)
    (folder / COMMIT).write_bytes(commit.encode())


def described(folder: Path, name: str) -> FileEntry:
    return FileEntry.from_bytes(name, (folder / name).read_bytes())


def into_shard(data: bytes, shard: bytes) -> bytes:
    """The payload over the first bytes of a shard, whose length does not change."""
    return data + shard[len(data) :]


def combinations(folder: Path, canary: Path) -> list[tuple[Payload, str, str]]:
    names = [path.name for path in sorted(folder.iterdir())]
    found = list(product([*plain(canary), *wrapped(canary)], names, SEALS))
    found += product(inside_metadata((folder / METADATA).read_bytes(), canary), [METADATA], SEALS)
    return found


def read_every_way(world: World, folder: Path) -> Counter[str]:
    """Run everything that opens a checkpoint; returns the results."""
    outcomes: Counter[str] = Counter()
    for options in ({}, {"restore": RestoreOptions(trust_foreign=True)}):
        target = marked(state(2))
        with world.checkpointer(**options) as made:
            watch.on = True
            try:
                restored = made.restore(target)
                outcomes["loaded" if restored else "nothing there"] += 1
            except CheckpointError:
                outcomes["refused"] += 1
                assert same(target, marked(target)), "a refused checkpoint reached the model"
            finally:
                watch.on = False
    for level in (*LEVELS, *AUDITS):
        watch.on = True
        try:
            check = verify_checkpoint if level in LEVELS else audit_checkpoint
            outcomes[f"verify {check(LocalStorage(folder.parent), folder.name, level).ok}"] += 1
        finally:
            watch.on = False
    return outcomes


def under_dcp(folder: Path, canary: Path) -> bool:
    """Whether plain `dcp.load` runs the payload."""
    target = marked(state(2))
    with contextlib.suppress(*FAILURES), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain_load(folder, target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # files that a payload has opened
        gc.collect()
    ran = canary.exists()
    if ran:
        shutil.rmtree(canary) if canary.is_dir() else canary.unlink()
    return ran


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    place, every = Path(sys.argv[1]), int(sys.argv[2])
    canary = place / "canary"
    copyreg.add_extension("os", "system", 0xF0)
    healthy = World(place / "healthy")
    healthy.save(2)
    world, folder = World(place / "read"), World(place / "read").folder(2)
    fresh_copy(healthy.folder(2), folder)
    for _ in range(2):  # whatever is imported late is imported now
        usual = read_every_way(world, folder)
    (folder / SHARD).write_bytes(b"")
    read_every_way(world, folder)
    watch.seen.clear()
    outcomes: Counter[str] = Counter()
    ran_under_dcp, tried = 0, 0
    for payload, name, seal in combinations(healthy.folder(2), canary)[::every]:
        fresh_copy(healthy.folder(2), folder)
        data = into_shard(payload.data, (folder / name).read_bytes()) if name == SHARD else payload.data
        (folder / name).write_bytes(data)
        if seal != SEALS[0]:
            seal_again(folder)
        outcomes += read_every_way(world, folder)
        tried += 1
        assert not canary.exists(), f"{payload.name} in {name}, {seal}: it ran"
        assert not watch.seen, f"{payload.name} in {name}, {seal}: {watch.seen}"
        ran_under_dcp += name in (METADATA, SHARD) and seal == SEALS[0] and under_dcp(folder, canary)
    reported = {"tried": tried, "outcomes": dict(outcomes), "usual": dict(usual), "ran_under_dcp": ran_under_dcp}
    sys.stdout.write(json.dumps(reported) + "\n")
    sys.stdout.flush()
    os._exit(0)


watch = Watch()
