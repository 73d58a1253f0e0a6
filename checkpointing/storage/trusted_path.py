"""Checks whether other users could replace a path. Like OpenSSH's StrictModes, it examines each folder from `/` down.

Other users who may write to a folder can rename its entries, regardless of the entries' modes, unless it is sticky
(`/tmp`). A private folder inside a shared one is therefore identified by its owner and held by a descriptor, because
its name proves nothing.
"""

import errno
import getpass
import grp
import os
import pwd
import shlex
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_FIRST_PERSON = 1000
_NOBODY = 65534
"""UIDs below _FIRST_PERSON, and _NOBODY (root on a root-squashed mount), are system accounts (such as `bin`)."""
_MOST_LINKS = 40
_LOOK = os.O_PATH | os.O_CLOEXEC
_ACL = "system.posix_acl_access"
_ACL_USER, _ACL_GROUP_OBJ, _ACL_GROUP = 0x02, 0x04, 0x08


class NotPrivate(OSError):
    """A folder that should belong to this user alone but does not."""


@dataclass(frozen=True, kw_only=True)
class Weakness:
    """A folder or link on the path through which another user could replace its target."""

    path: Path
    owner: int
    mode: int
    writers: str  # users who may write to it; empty if only the owner, another user, may

    def __str__(self) -> str:
        kept = f"mode {stat.S_IMODE(self.mode):04o}, owner {user_name(self.owner)}"
        return f"{self.path} can be changed by {self.writers or user_name(self.owner)} ({kept})"

    def closing(self) -> str:
        """Return the command that removes the weakness; empty if another user owns the folder."""
        if self.owner != os.geteuid():
            return ""
        who = "o" if self.mode & stat.S_IWOTH else ""
        who = f"g{who}" if self.mode & stat.S_IWGRP else who
        return f"chmod {who}-w {shlex.quote(str(self.path))}"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A folder opened by descriptor, and the weaknesses above it, outermost first."""

    path: Path
    descriptor: int
    weak: tuple[Weakness, ...]

    def fault(self) -> str:
        """Return why the folder itself is not private to this user; empty if it is."""
        if links := [weak for weak in self.weak if stat.S_ISLNK(weak.mode)]:
            return f"{links[0].path} is a link created by {user_name(links[0].owner)}"
        status = os.fstat(self.descriptor)
        if not is_trusted(status.st_uid):
            return f"{self.path} belongs to {user_name(status.st_uid)}, not to {user_name(os.geteuid())}"
        if writers := _writers(self.descriptor, status):
            return f"{self.path} can be changed by {writers} (mode {stat.S_IMODE(status.st_mode):04o})"
        return ""

    def require_private(self) -> None:
        """Raise NotPrivate if the folder itself is not private to this user."""
        if fault := self.fault():
            raise NotPrivate(errno.EPERM, fault, str(self.path))


def is_trusted(uid: int) -> bool:
    """Return whether to trust this user's files.

    Root and the current user are trusted. If the current user is root, so is user 65534 (NFS root squash).
    """
    own = os.geteuid()
    return uid in (0, own) or (own == 0 and uid == _NOBODY)


def user_name(uid: int) -> str:
    """Return the account's name, or its uid as text if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def own_name() -> str:
    """Return the current user's name from the login variables or the account, or the uid as text if neither has one."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # depends on the Python version
        return str(os.getuid())


@contextmanager
def open_folder(path: Path) -> Iterator[Opened]:
    """Open a folder component by component. Raises OSError."""
    walk = _Walk()
    try:
        walk.go(path.absolute())
        yield Opened(path=path, descriptor=walk.descriptor, weak=tuple(walk.weak))
    finally:
        os.close(walk.descriptor)


def weakness(path: Path) -> Weakness | None:
    """Return the first folder or link on the path, including `path`, that others may write to, or None. Raises OSError.

    A folder that only its owner may write to does not count, even if the owner is another user.
    """
    with open_folder(path) as found:
        weak = (*found.weak, *_weak_folder(found.descriptor, path))
        return next((each for each in weak if each.writers), None)


def can_be_exchanged(path: Path) -> bool:
    """Return whether another user could replace this folder; False if the folder cannot be opened."""
    try:
        with open_folder(path) as found:
            return bool(found.weak)
    except OSError:
        return False


def check_unshared(path: Path, *, then: str) -> None:
    """Raise NotPrivate if others may write to or rename the folder.

    `then` is a further remedy to name in the message.
    """
    with suppress(FileNotFoundError):
        if weak := weakness(path):
            cure = " or ".join(filter(None, [weak.closing(), then]))
            raise NotPrivate(errno.EPERM, f"{weak}, and files there determine what runs as you ({cure})", str(path))


def check_private(path: Path) -> None:
    """Raise NotPrivate if the folder belongs to another user or others may write to it.

    Raise OSError if it does not exist.
    """
    with open_folder(path) as found:
        found.require_private()


_held: dict[Path, Path] = {}


def pin_path(path: Path) -> Path:
    """Return a name for a private folder that cannot be redirected during the life of this process.

    The name is `path` if no other user can rename it, else `/proc/<pid>/fd/<n>`, which the user's other processes can
    also open. Raises NotPrivate, or OSError if the folder does not exist.
    """
    if path not in _held:
        with open_folder(path) as found:
            found.require_private()
            _held[path] = Path(f"/proc/{os.getpid()}/fd/{os.dup(found.descriptor)}") if found.weak else path
    return _held[path]


@contextmanager
def pin_path_temporarily(path: Path) -> Iterator[Path]:
    """Yield the same name as `pin_path`, valid only within the context."""
    with open_folder(path) as found:
        found.require_private()
        yield Path(f"/proc/{os.getpid()}/fd/{found.descriptor}") if found.weak else path


class _Walk:
    """State of one walk: a single descriptor that moves down the path."""

    def __init__(self) -> None:
        self.weak: list[Weakness] = []
        self.descriptor = os.open("/", _LOOK | os.O_DIRECTORY)
        self._place = Path("/")
        self._links = 0

    def go(self, path: Path) -> None:
        left = list(reversed(str(path).split("/")))
        try:
            while left:
                if (name := left.pop()) not in ("", "."):
                    left += reversed(self._step(name))
        except OSError as error:
            error.filename = str(path)
            raise

    def _step(self, name: str) -> list[str]:
        """Enter `name`. If it is a link, return the components to walk instead."""
        for weak in _weak_folder(self.descriptor, self._place):
            self._add(weak)
        entered = os.open(name, _LOOK | os.O_NOFOLLOW, dir_fd=self.descriptor)
        place = self._place.parent if name == ".." else self._place / name
        status = os.fstat(entered)
        if stat.S_ISLNK(status.st_mode):
            try:
                return self._follow(entered, status, place)
            finally:
                os.close(entered)
        if not stat.S_ISDIR(status.st_mode):
            os.close(entered)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        os.close(self.descriptor)
        self.descriptor, self._place = entered, place
        return []

    def _follow(self, link: int, status: os.stat_result, place: Path) -> list[str]:
        self._links += 1
        if self._links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if _is_person(status.st_uid):
            owner = user_name(status.st_uid)
            self._add(Weakness(path=place, owner=status.st_uid, mode=status.st_mode, writers=owner))
        target = os.readlink("", dir_fd=link)
        if target.startswith("/"):
            top = os.open("/", _LOOK | os.O_DIRECTORY)
            os.close(self.descriptor)
            self.descriptor, self._place = top, Path("/")
        return target.split("/")

    def _add(self, weak: Weakness) -> None:
        if all(weak.path != known.path for known in self.weak):
            self.weak.append(weak)


def _weak_folder(descriptor: int, place: Path) -> list[Weakness]:
    """Return the weakness of a folder whose entries others can rename, if any."""
    status = os.fstat(descriptor)
    writers = "" if status.st_mode & stat.S_ISVTX else _writers(descriptor, status)
    if not writers and not _is_person(status.st_uid):
        return []
    return [Weakness(path=place, owner=status.st_uid, mode=status.st_mode, writers=writers)]


def _is_person(uid: int) -> bool:
    """Return whether this is another person's account, which is not trusted as system accounts are."""
    return not is_trusted(uid) and uid >= _FIRST_PERSON and uid != _NOBODY


def _writers(descriptor: int, status: os.stat_result) -> str:
    """Return which users other than the owner may write to a folder; empty if only the owner may."""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if not status.st_mode & stat.S_IWGRP:
        return ""
    acl = b""
    with suppress(OSError):  # a file system without ACLs
        acl = os.getxattr(f"/proc/self/fd/{descriptor}", _ACL)
    if acl:
        return _acl_writers(acl, status)
    return "" if _is_own_group(status.st_gid) else f"group {_group_name(status.st_gid)}"


def _acl_writers(acl: bytes, status: os.stat_result) -> str:
    """Return a user or group that the ACL lets write. With an ACL, the mode's group bits are only its mask."""
    entries = [struct.unpack_from("<HHI", acl, at) for at in range(4, len(acl) - 7, 8)]
    for tag, allowed, who in entries:
        if not allowed & 2:
            continue
        if tag == _ACL_USER and not is_trusted(who):
            return user_name(who)
        if tag in (_ACL_GROUP_OBJ, _ACL_GROUP):
            group = status.st_gid if tag == _ACL_GROUP_OBJ else who
            if not _is_own_group(group):
                return f"group {_group_name(group)}"
    return ""


def _is_own_group(gid: int) -> bool:
    """Return whether this is the user's private group, with no other members, such as many systems create."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
