"""Folders of checkpoints on Lustre."""

import os
from pathlib import Path

import pytest

from checkpointing.storage.backends import LocalStorage, open_storage
from checkpointing.tiers.catalog import Catalog
from checkpointing.tiers.tier import ResolvedTier, make_striped_folder, on_lustre

NAME = "step-00000005.001-ab12cd34"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `lfs` that notes its arguments, and whether the folder was there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "lfs"
    script.write_text(f'#!/bin/sh\ntest -d "$4" && echo "$@" >> {tmp_path}/calls\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path / "calls"


def mounts(tmp_path: Path, *lines: str) -> Path:
    table = tmp_path / "mounts"
    table.write_text("".join(f"{line}\n" for line in ("/dev/sda1 / ext4 rw 0 0", *lines)))
    return table


def lustre(tmp_path: Path) -> Path:
    return mounts(tmp_path, f"10.0.0.1@tcp:/scratch {tmp_path} lustre rw,flock 0 0")


def place(root: Path, stripes: int) -> ResolvedTier:
    storage = LocalStorage(root)
    return ResolvedTier(path=str(root), storage=storage, catalog=Catalog(root, storage), stripes=stripes)


def test_a_folder_on_lustre_is_made_and_striped(tmp_path: Path, calls: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    assert make_striped_folder(place(root, 4), NAME, lustre(tmp_path)) is None
    assert (root / NAME).is_dir()
    assert calls.read_text() == f"setstripe -c 4 {root / NAME}\n"


@pytest.mark.parametrize("reason", ["no stripes asked for", "not on lustre", "no lfs", "object store"])
def test_elsewhere_nothing_is_done(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    tier, table = place(tmp_path / "tier", 4), lustre(tmp_path)
    if reason == "no stripes asked for":
        tier = place(tmp_path / "tier", 0)
    elif reason == "not on lustre":
        table = mounts(tmp_path)
    elif reason == "no lfs":
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
    else:
        remote = open_storage("memory://stripes")
        tier = ResolvedTier(
            path="memory://stripes", storage=remote, catalog=Catalog("memory://stripes", remote), stripes=4
        )
    assert make_striped_folder(tier, NAME, table) is None
    assert not calls.exists()
    assert not (tmp_path / "tier").exists()


def test_an_lfs_that_fails_is_a_warning(tmp_path: Path, calls: Path) -> None:
    script = tmp_path / "bin" / "lfs"
    script.write_text("#!/bin/sh\necho 'error: stripe count 4 exceeds 2' >&2\nexit 22\n")
    warning = make_striped_folder(place(tmp_path / "tier", 4), NAME, lustre(tmp_path))
    assert warning is not None
    assert "setstripe -c 4" in warning
    assert "(22): error: stripe count 4 exceeds 2" in warning
    assert (tmp_path / "tier" / NAME).is_dir(), "the checkpoint is written all the same"


def test_the_innermost_mount_counts(tmp_path: Path) -> None:
    inner = tmp_path / "with blank" / "local"
    inner.mkdir(parents=True)
    blank = str(tmp_path / "with blank").replace(" ", "\\040")
    table = mounts(tmp_path, f"srv:/a {blank} lustre rw 0 0", f"/dev/sdb {blank}/local ext4 rw 0 0")
    assert on_lustre(tmp_path / "with blank" / "not" / "there" / "yet", table)
    assert not on_lustre(inner, table)
    assert not on_lustre(tmp_path, table)
    assert not on_lustre(tmp_path, tmp_path / "no such table")


def test_links_are_followed(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    os.symlink(real, tmp_path / "link")
    table = mounts(tmp_path, f"srv:/a {real} lustre rw 0 0")
    assert on_lustre(tmp_path / "link" / "run", table)
