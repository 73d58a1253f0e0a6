"""Who could replace the file at a path, with real folders, links and access lists."""

import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing.storage import trusted_path
from checkpointing.storage.durable import NotAFile, only_own_files, read_json
from checkpointing.storage.trusted_path import NotPrivate, check_private, open_folder, pin_path_temporarily, weakness

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
ANN, BOB, GROUP = 61001, 61002, 61003


@pytest.fixture
def ann() -> Iterator[None]:
    """This process is an ordinary user, as far as files go."""
    os.seteuid(ANN)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="orch-path-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def make(path: Path, owner: int, mode: int, group: int = 0) -> Path:
    path.mkdir()
    os.chown(path, owner, group)
    path.chmod(mode)
    return path


def acl(path: Path, *entries: tuple[int, int, int]) -> None:
    packed = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + packed)
    except OSError:
        pytest.skip("this file system has no access lists")


def test_an_own_folder_is_safe(tmp_path: Path) -> None:
    assert weakness(tmp_path) is None
    check_private(tmp_path)


@needs_root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "who"),
    [
        (0, GROUP, 0o2770, f"group {GROUP}"),
        (ANN, GROUP, 0o775, f"group {GROUP}"),
        (0, 0, 0o777, "everybody"),
        (0, 0, 0o1777, ""),
        (0, GROUP, 0o3770, ""),
        (ANN, 0, 0o755, ""),
        (0, 0, 0o755, ""),
        (BOB, 0, 0o755, ""),
        (65534, 0, 0o755, ""),
    ],
)
def test_others_that_may_write_a_folder_above_are_found(top, ann, owner, group, mode, who):
    os.seteuid(0)
    above = make(top / "above", owner, mode, group)
    below = make(above / "below", ANN, 0o700)
    os.setgroups([GROUP])
    os.seteuid(ANN)
    found = weakness(below)
    assert (found.writers if found else "") == who
    if found:
        assert found.path == above
        assert ("chmod" in found.closing()) is (owner == ANN)


@needs_root
def test_another_users_folder_above_makes_only_the_name_unsafe(top, ann):
    os.seteuid(0)
    own = make(make(top / "bobs", BOB, 0o755) / "own", ANN, 0o700)
    os.seteuid(ANN)
    assert weakness(own) is None
    with open_folder(own) as found:
        assert [weak.owner for weak in found.weak] == [BOB]


@needs_root
def test_following_the_hint_makes_it_safe(top, ann):
    os.seteuid(0)
    folder = make(top / "it s", ANN, 0o777)
    os.seteuid(ANN)
    found = weakness(folder)
    assert found is not None
    assert os.system(found.closing()) == 0  # noqa: S605
    assert weakness(folder) is None


@needs_root
def test_an_access_list_says_who_may_write_not_its_mask(top, ann):
    os.seteuid(0)
    harmless, weak = make(top / "harmless", 0, 0o755), make(top / "weak", 0, 0o755)
    own, group, other, mask, none = (0x01, 7), (0x04, 5), (0x20, 5), (0x10, 7), 0xFFFFFFFF
    for folder, user in ((harmless, ANN), (weak, BOB)):
        acl(folder, (*own, none), (0x02, 7, user), (*group, none), (*mask, none), (*other, none))
    assert harmless.stat().st_mode & 0o020, "the mode shows the mask"
    os.seteuid(ANN)
    assert weakness(harmless) is None
    found = weakness(weak)
    assert found is not None
    assert found.writers == f"uid {BOB}"


@needs_root
def test_links_are_followed_and_are_as_weak_as_their_owner(top, ann):
    os.seteuid(0)
    sticky, own = make(top / "sticky", 0, 0o1777), make(top / "own", ANN, 0o700)
    for name, owner in (("anns", ANN), ("bobs", BOB)):
        (sticky / name).symlink_to("../own/../own")
        os.chown(sticky / name, owner, -1, follow_symlinks=False)
    os.seteuid(ANN)
    assert weakness(sticky / "anns") is None
    found = weakness(sticky / "bobs")
    assert found is not None
    assert (found.path, found.writers) == (sticky / "bobs", f"uid {BOB}")
    with open_folder(sticky / "anns") as folder:
        assert os.path.samestat(os.fstat(folder.descriptor), own.stat())


def test_a_link_without_end_a_file_and_nothing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name in ("loop", "file", "gone"):
        with pytest.raises(OSError, match=str(tmp_path / name)):
            weakness(tmp_path / name)


@needs_root
def test_a_pinned_folder_stays_the_same_whatever_its_name_means(top, ann):
    os.seteuid(0)
    shared = make(top / "shared", 0, 0o777)
    own = make(shared / "run", ANN, 0o700)
    os.seteuid(ANN)
    (own / "whose").write_text("Ann's")
    with pin_path_temporarily(own) as place:
        own.rename(shared / "aside")
        own.mkdir()
        (own / "whose").write_text("Bob's")
        assert (place / "whose").read_text() == "Ann's"
        assert place.parts[:3] == ("/", "proc", str(os.getpid()))


def test_a_name_that_only_its_owner_may_change_is_kept(tmp_path: Path) -> None:
    with pin_path_temporarily(tmp_path) as place:
        assert place == tmp_path
    assert trusted_path.pin_path(tmp_path) == tmp_path


@needs_root
@pytest.mark.parametrize(("owner", "mode"), [(BOB, 0o700), (BOB, 0o777), (ANN, 0o770), (ANN, 0o777)])
def test_files_of_others_and_open_files_are_not_private(top, ann, owner, mode):
    os.seteuid(0)
    folder = make(top / "folder", owner, mode, GROUP)
    os.seteuid(ANN)
    with pytest.raises(NotPrivate):
        check_private(folder)
    with pytest.raises(NotPrivate), pin_path_temporarily(folder):
        pass


@needs_root
def test_only_own_files_are_read_on_request(top, ann):
    os.seteuid(0)
    for name, owner in (("anns", ANN), ("bobs", BOB), ("roots", 0)):
        (top / name).write_text("{}")
        os.chown(top / name, owner, -1)
    os.seteuid(ANN)
    assert read_json(top / "bobs") == {}
    with only_own_files():
        assert read_json(top / "anns") == read_json(top / "roots") == {}
        with pytest.raises(NotAFile, match=f"belongs to uid {BOB}"):
            read_json(top / "bobs")
    assert read_json(top / "bobs") == {}
