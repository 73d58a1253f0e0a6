"""The disk that a drill may fill: mounted, filled, and gone again with the run kept."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.drills import small_disk as disks
from orchestrator.cli.drills.small_disk import run_in_namespace, small_disk


@pytest.fixture
def screen() -> Any:
    said: list[str] = []
    return SimpleNamespace(said=said, note=said.append, warn=lambda code, text: said.append(text))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_is_really_full_and_its_run_stays_when_it_is_gone(tmp_path: Path, screen: Any) -> None:
    place = tmp_path / "full-disk"
    with small_disk(screen, place) as disk:
        assert disk is not None
        assert os.path.ismount(place)
        run = place / "drill-full-disk-1"
        run.mkdir()
        (run / "run.json").write_text("{}")
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (run / "more").write_bytes(bytes(100))
        disk.make_room()
        assert not disk.is_filled
        (run / "more").write_bytes(bytes(100))
        disk.keep(run)
    assert not os.path.ismount(place)
    assert sorted(os.listdir(place)) == ["drill-full-disk-1"]
    assert sorted(os.listdir(run)) == ["more", "run.json"]
    assert sorted(os.listdir(tmp_path)) == ["full-disk"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_whose_run_goes_on_is_left_and_told_of_and_replaced_by_the_next(tmp_path: Path, screen: Any) -> None:
    for _ in range(2):
        with small_disk(screen, tmp_path / "disk"):
            assert os.listdir(tmp_path / "disk") == []
            (tmp_path / "disk" / "run").mkdir()
        assert screen.said[-1] == f"the run goes on, and its disk stays mounted:  umount {tmp_path / 'disk'}"
    disks._mount("umount", str(tmp_path / "disk"))
    assert not os.path.ismount(tmp_path / "disk")


def test_where_nothing_can_be_mounted_the_drill_says_what_stands_for_it(
    tmp_path: Path, screen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "_mount", lambda *_: False)
    with small_disk(screen, tmp_path / "disk") as disk:
        assert disk is None
    assert "a limit on the size of files stands for the full disk" in screen.said[-1]


def test_root_needs_no_namespace_of_its_own(screen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert run_in_namespace(screen) is None
    assert screen.said == []
