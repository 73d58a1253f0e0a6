"""Places of a run's tiers."""

import os
import sys
from pathlib import Path

import pytest

from checkpointing.config import CheckpointConfig, TierConfig
from checkpointing.errors import TierUnavailable
from checkpointing.storage.backends import FsspecStorage, LocalStorage
from checkpointing.tiers.tier import ResolvedTier, make_striped_folder, on_lustre, one_folder, resolve_tiers
from tests.checkpointing.made_checkpoint import make, tier_at


def found(run: Path, *tiers: TierConfig, keep: int = 3) -> tuple[ResolvedTier, ...]:
    return resolve_tiers(CheckpointConfig(tiers=tiers, keep=keep), run / "checkpoints", "my-run", "node-7")


def test_without_tiers_the_runs_own_folder_is_used(tmp_path: Path) -> None:
    (only,) = found(tmp_path, keep=5)
    assert (only.path, only.keep, only.every, only.shared) == (str(tmp_path / "checkpoints"), 5, 0, True)
    assert isinstance(only.storage, LocalStorage)
    assert only.catalog.storage is only.storage


def test_a_folder_reached_by_another_way_keeps_its_name(tmp_path: Path) -> None:
    way = Path("/proc/7/fd/4/checkpoints")
    config = CheckpointConfig(tiers=(TierConfig(), TierConfig(path="../fast"), TierConfig(path="/local/nvme")))
    tiers = resolve_tiers(config, way, "my-run", "node-7", known_as=tmp_path)
    assert [tier.path for tier in tiers] == [
        str(tmp_path / "checkpoints"), str(tmp_path / "../fast/my-run"), "/local/nvme/my-run",
    ]  # fmt: skip
    reached = [str(way), "/proc/7/fd/4/../fast/my-run", "/local/nvme/my-run"]
    assert [tier.catalog.place for tier in tiers] == reached
    assert [str(tier.storage.root) for tier in tiers if isinstance(tier.storage, LocalStorage)] == reached


def test_the_runs_name_is_added_and_on_a_nodes_own_disk_the_nodes(tmp_path: Path) -> None:
    tiers = found(
        tmp_path,
        TierConfig(path="/local/nvme", shared=False),
        TierConfig(every=50, keep=4, bandwidth=20.0, stripes=8),
        TierConfig(path="memory://bucket/prefix/"),
    )
    assert [tier.path for tier in tiers] == [
        "/local/nvme/my-run/node-7",
        str(tmp_path / "checkpoints"),
        "memory://bucket/prefix/my-run",
    ]
    assert [tier.shared for tier in tiers] == [False, True, True]
    run = tiers[1]
    assert (run.every, run.keep, run.bandwidth, run.stripes) == (50, 4, 20.0, 8)
    assert isinstance(tiers[2].storage, FsspecStorage)


def test_relative_and_home_paths_mean_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    tiers = (TierConfig(path="fast"), TierConfig(path="~/slow"))
    expected = [str(tmp_path / "fast/my-run"), "/home/ada/slow/my-run"]
    assert [tier.path for tier in found(tmp_path, *tiers)] == expected
    monkeypatch.chdir("/")
    assert [tier.path for tier in found(tmp_path, *tiers)] == expected


def test_entries_of_a_remote_tier_say_their_url(tmp_path: Path) -> None:
    (tier,) = found(tmp_path, TierConfig(path="memory://place-of-entries"))
    name = make(tier.storage, 5)
    (entry,) = tier.catalog.committed_entries()
    assert entry.place == f"memory://place-of-entries/my-run/{name}"


def test_resolving_tiers_makes_no_folders(tmp_path: Path) -> None:
    found(tmp_path, TierConfig(path="fast"))
    assert list(tmp_path.iterdir()) == []


def test_impossible_tiers_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shared folder; leave `shared` out"):
        found(tmp_path, TierConfig(shared=False), TierConfig(path="/shared"))
    with pytest.raises(ValueError, match="cannot be the name of a folder"):
        resolve_tiers(CheckpointConfig(), tmp_path, "..", "node")
    with pytest.raises(ValueError, match="give the full path"):
        found(tmp_path, TierConfig(path="~nobody-of-that-name/x"))


def test_a_missing_library_is_reported_with_its_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        TierUnavailable, match=r"checkpoint\.tiers: gs://bucket needs a library that is missing: .*gcsfs"
    ):
        found(tmp_path, TierConfig(path="gs://bucket"))


def test_two_tiers_in_one_folder_are_found_through_links(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "link").symlink_to("nvme")
    tiers = (TierConfig(path=str(tmp_path / "nvme"), shared=False), TierConfig())
    config = CheckpointConfig(tiers=(*tiers, TierConfig(path=str(tmp_path / "link"), shared=False)))
    places = resolve_tiers(config, tmp_path / "runs" / "r-1" / "checkpoints", "r-1", "n1")
    same = (str(tmp_path / "nvme" / "r-1" / "n1"), str(tmp_path / "link" / "r-1" / "n1"))
    assert one_folder(places) == same
    (tmp_path / "nvme" / "r-1" / "n1").mkdir(parents=True)
    assert one_folder(places) == same
    assert one_folder(places[:2]) is None


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


def test_a_folder_on_lustre_is_made_and_striped(tmp_path: Path, calls: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    assert make_striped_folder(tier_at(root, stripes=4), NAME, lustre(tmp_path)) is None
    assert (root / NAME).is_dir()
    assert calls.read_text() == f"setstripe -c 4 {root / NAME}\n"


@pytest.mark.parametrize("reason", ["no stripes asked for", "not on lustre", "no lfs", "object store"])
def test_other_file_systems_are_not_striped(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    tier, table = tier_at(tmp_path / "tier", stripes=4), lustre(tmp_path)
    if reason == "no stripes asked for":
        tier = tier_at(tmp_path / "tier", stripes=0)
    elif reason == "not on lustre":
        table = mounts(tmp_path)
    elif reason == "no lfs":
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
    else:
        tier = tier_at("memory://stripes", stripes=4)
    assert make_striped_folder(tier, NAME, table) is None
    assert not calls.exists()
    assert not (tmp_path / "tier").exists()


def test_an_lfs_that_fails_is_a_warning(tmp_path: Path, calls: Path) -> None:
    script = tmp_path / "bin" / "lfs"
    script.write_text("#!/bin/sh\necho 'error: stripe count 4 exceeds 2' >&2\nexit 22\n")
    warning = make_striped_folder(tier_at(tmp_path / "tier", stripes=4), NAME, lustre(tmp_path))
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
