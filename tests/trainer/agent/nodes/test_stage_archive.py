"""Unpacking an archive to a node's disk: once, checked, and with a reason if it fails."""

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer.agent.nodes.node_disk import ARCHIVE, DISK, FOLDER, NotPrepared
from trainer.agent.nodes.stage_archive import MARKER, StagedArchive, stage_archive
from trainer.protocol.config_sections.node_setup_config import StageConfig

PYTHON = "#!/bin/sh\necho staged\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    (folder / "data").write_bytes(os.urandom(200_000))
    return folder


def pack(tree: Path, ending: str) -> Path:
    """Pack the content of a folder, or for `.tgz` the folder itself."""
    archive = tree.parent / f"env{ending}"
    if ending in (".sqsh", ".squashfs"):
        subprocess.run(
            ["mksquashfs", str(tree), str(archive), "-quiet", "-no-progress"], check=True, capture_output=True
        )
    else:
        inside = ["-C", str(tree.parent), "env"] if ending == ".tgz" else ["-C", str(tree), "."]
        subprocess.run(["tar", "-caf", str(archive), *inside], check=True)
    return archive


def config(archive: Path, to: Path, **changes) -> StageConfig:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return StageConfig(**{"archive": str(archive), "to": str(to), "sha256": digest, **changes})


def stage(archive: Path, to: Path, **changes) -> StagedArchive:
    return stage_archive(config(archive, to, **changes), {})


def stage_in_another_process(archive: Path, to: Path) -> Path:
    """Stage an archive as an agent that is gone afterwards, and return its folder."""
    code = "import sys; from tests.trainer.agent.nodes.test_stage_archive import *;"
    code += "print(stage(Path(sys.argv[1]), Path(sys.argv[2])).folder)"
    words = [sys.executable, "-c", code, str(archive), str(to)]
    return Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz", ".tar.zst", ".sqsh"])
def test_an_archive_is_unpacked_once(tree: Path, tmp_path: Path, ending: str):
    if ending == ".sqsh" and shutil.which("mksquashfs") is None:
        pytest.skip("squashfs-tools is not installed: apt-get install squashfs-tools")
    archive, disk = pack(tree, ending), tmp_path / "disk"
    first = stage(archive, disk)
    assert not first.reused
    assert (first.folder / "data").read_bytes() == (tree / "data").read_bytes()
    assert subprocess.run([first.python], capture_output=True, text=True, check=True).stdout == "staged\n"
    (first.folder / "data").write_bytes(b"seen")
    second = stage(archive, disk)
    assert (second.folder, second.reused) == (first.folder, True)
    assert (second.folder / "data").read_bytes() == b"seen"


def test_an_environment_of_one_folder_is_not_mistaken_for_it(tree: Path, tmp_path: Path):
    (tree / "data").unlink()
    assert stage(pack(tree, ".tar"), tmp_path / "disk").python.endswith("/bin/python")


def test_jobs_that_start_together_unpack_once(tree: Path, tmp_path: Path):
    archive = pack(tree, ".tar.gz")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: stage(archive, tmp_path / "disk"), range(4)))
    assert sorted(one.reused for one in found) == [False, True, True, True]
    assert len({one.folder for one in found}) == 1


def test_the_part_that_a_killed_agent_left_is_replaced(tree: Path, tmp_path: Path):
    archive = pack(tree, ".tar")
    folder = stage_in_another_process(archive, tmp_path / "disk")
    (folder / MARKER).unlink()
    (folder / "data").write_bytes(b"torn")
    again = stage(archive, tmp_path / "disk")
    assert not again.reused
    assert (again.folder / "data").read_bytes() == (tree / "data").read_bytes()


def test_another_content_is_another_folder(tree: Path, tmp_path: Path):
    old = stage(pack(tree, ".tar"), tmp_path / "disk").folder
    (tree / "data").write_bytes(b"new")
    new = stage(pack(tree, ".tar"), tmp_path / "disk").folder
    assert (old / "data").exists()
    assert (new / "data").read_bytes() == b"new"


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tar.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_archive_is_refused_and_leaves_nothing(tree: Path, tmp_path: Path, ending: str, damage: str):
    archive, disk = pack(tree, ending), tmp_path / "disk"
    wanted, content = config(archive, disk), bytearray(archive.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    with pytest.raises(NotPrepared, match=rf"env{ending} is damaged or has changed: its SHA-256 is") as caught:
        stage_archive(wanted, {})
    assert caught.value.check == ARCHIVE
    (own,) = disk.iterdir()
    assert list(own.iterdir()) == []


def test_an_archive_whose_digest_is_right_but_whose_content_is_not_an_archive(tmp_path: Path):
    archive = tmp_path / "x.tar.gz"
    archive.write_bytes(b"no archive")
    with pytest.raises(NotPrepared, match=r"x.tar.gz cannot be unpacked: .*not in gzip format"):
        stage(archive, tmp_path / "disk")


def test_a_missing_program_is_named(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = pack(tree, ".tar.zst")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tar").symlink_to(shutil.which("tar") or "tar")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(NotPrepared, match="zstd is not installed on this node; install it, or stage a .tar"):
        stage(archive, tmp_path / "disk")


def test_a_missing_archive_is_named(tmp_path: Path):
    missing = StageConfig(archive=str(tmp_path / "no.tar"), to=str(tmp_path), sha256="0" * 64)
    with pytest.raises(NotPrepared, match=r"no.tar to .*: No such file or directory: .*no.tar"):
        stage_archive(missing, {})


def test_a_folder_that_cannot_be_used_is_named_with_the_command_to_type(tree: Path, tmp_path: Path):
    (tmp_path / "disk").touch()
    with pytest.raises(NotPrepared, match=r"^cluster.stage.to=.*/disk cannot be used on this node: ") as caught:
        stage(pack(tree, ".tar"), tmp_path / "disk")
    assert caught.value.check == FOLDER
    assert "`orch resume RUN cluster.stage.to=FOLDER` chooses a folder that you may write to" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("files", ["some", "one"])
def test_a_full_disk_is_the_nodes_fault_and_the_part_is_deleted(tree: Path, tmp_path: Path, files: str):
    if files == "one":
        shutil.rmtree(tree / "bin")
    archive, disk = pack(tree, ".tar"), tmp_path / "disk"
    wanted = config(archive, disk)
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=True)
    try:
        with pytest.raises(NotPrepared, match=r"is full while unpacking .*; cluster.stage.to=FOLDER") as caught:
            stage_archive(wanted, {})
        assert caught.value.check == DISK
        (own,) = disk.iterdir()
        assert list(own.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_condas_paths_are_fixed_where_the_archive_lies(tree: Path, tmp_path: Path):
    (tree / "bin" / "python").write_text('#!/bin/sh\nexec sh "$@"\n')
    (tree / "bin" / "conda-unpack").write_text('echo "$0" > "$(dirname "$0")/../prefix"\n')
    staged = stage(pack(tree, ".tar"), tmp_path / "disk")
    assert (staged.folder / "prefix").read_text() == f"{staged.folder}/bin/conda-unpack\n"
    (tree / "bin" / "conda-unpack").write_text("echo no prefix here >&2; exit 3\n")
    with pytest.raises(NotPrepared, match="conda-unpack failed: no prefix here"):
        stage(pack(tree, ".tar"), tmp_path / "disk")


def test_archives_that_no_job_used_for_long_are_deleted(tree: Path, tmp_path: Path):
    old = stage_in_another_process(pack(tree, ".tar"), tmp_path / "disk")
    lock = old.with_name(f".{old.name}.lock")
    os.utime(lock, (0, 0))
    (tree / "data").write_bytes(b"new")
    new = stage(pack(tree, ".tar"), tmp_path / "disk").folder
    assert not old.exists()
    assert new.exists()


def test_an_archive_of_read_only_folders_is_unpacked_and_deleted(tree: Path, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (tree / "bin").chmod(0o555)
    tree.chmod(0o555)
    archive = pack(tree, ".tar")
    code = "import os, sys; from tests.trainer.agent.nodes.test_stage_archive import *;"
    code += "from trainer.agent.nodes.node_disk import delete_tree;"
    code += "archive, disk = Path(sys.argv[1]), Path(sys.argv[2]); wanted = config(archive, disk);"
    if os.geteuid() == 0:  # root may write to every folder
        disk.chmod(0o777)
        for place in (tmp_path, *tmp_path.parents):
            if place == Path("/tmp"):
                break
            place.chmod(0o755)
        code += "os.setgroups([]); os.setgid(65534); os.setuid(65534);"
    code += "folder = stage_archive(wanted, {}).folder; (folder / MARKER).unlink();"
    code += "delete_tree(folder); assert not folder.exists()"
    subprocess.run([sys.executable, "-c", code, str(archive), str(disk)], check=True)


def test_a_link_to_an_interpreter_that_the_node_lacks_is_refused(tree: Path, tmp_path: Path):
    (tree / "bin" / "python").unlink()
    (tree / "bin" / "python").symlink_to("/no/such/python3")
    with pytest.raises(NotPrepared, match=r"bin/python of .*env.tar is a link that leads nowhere on this node"):
        stage(pack(tree, ".tar"), tmp_path / "disk")


def test_a_folder_is_no_interpreter(tree: Path, tmp_path: Path):
    (tree / "bin" / "python").unlink()
    (tree / "bin" / "python").mkdir()
    assert stage(pack(tree, ".tar"), tmp_path / "disk").python == ""


def test_a_listed_digest_that_is_wrong_is_named(tree: Path, tmp_path: Path):
    archive = pack(tree, ".tar")
    archive.with_name("env.tar.sha256").write_text("0")
    with pytest.raises(NotPrepared, match=r"delete .*env.tar.sha256, or write it anew; then `orch resume RUN"):
        stage(archive, tmp_path / "disk", sha256="0" * 64)


def test_a_name_that_leads_outside_is_named(tree: Path, tmp_path: Path):
    archive = tmp_path / "env.tar"
    words = ["tar", "-cPf", str(archive), "-C", str(tree), "../env/data"]
    subprocess.run(words, check=True)
    with pytest.raises(NotPrepared, match=r"cannot be unpacked: .*Member name contains '..'"):
        stage(archive, tmp_path / "disk")


def test_a_full_disk_is_understood_in_every_language(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "bin" / "tar"
    program.parent.mkdir()
    archive = pack(tree, ".tar")
    english, german = "No space left on device", "Auf dem Datenträger ist kein Speicherplatz mehr verfügbar"
    program.write_text(f'#!/bin/sh\n[ "$LC_ALL" = C ] && echo "{english}" >&2 || echo "{german}" >&2\nexit 2\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(NotPrepared) as caught:
        stage(archive, tmp_path / "disk")
    assert caught.value.check == DISK
