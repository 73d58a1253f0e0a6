"""Taking checkpoints and debris away: a deletion in two phases, and which half-written folders may go (pure)."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from checkpointing.catalog import Catalog
from checkpointing.commit import DELETED, parse_name
from checkpointing.manifest import COMMIT
from checkpointing.storage import Storage

_NOTE = b"The deletion of this checkpoint was begun; it is no longer one.\n"

Epoch = tuple[int, str]
"""Attempt and nonce: whose a folder is, as its name says."""


class State(Enum):
    """What a folder without a valid marker is."""

    HALF_WRITTEN = "half-written"
    BURIED = "half-deleted"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that bears a checkpoint's name and is none; `bytes` is what lies in it."""

    name: str
    state: State
    bytes: int

    @property
    def epoch(self) -> Epoch:
        parts = parse_name(self.name)
        assert parts is not None
        return parts.attempt, parts.nonce


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a folder is collected, and why or why not."""

    folder: Folder
    collect: bool
    reason: str


def survey(catalog: Catalog) -> list[Folder]:
    """Everything that bears a checkpoint's name and is not committed, newest first; raises OSError."""
    return [_folder(catalog, name) for name in catalog.names() if not catalog.is_committed(name)]


def _folder(catalog: Catalog, name: str) -> Folder:
    sizes = catalog.storage.list(name).values()
    state = State.BURIED if catalog.is_buried(name) else State.HALF_WRITTEN
    return Folder(name=name, state=state, bytes=sum(size or 0 for size in sizes))


def plan(
    folders: Iterable[Folder],
    *,
    owner: Epoch | None = None,
    ended: Collection[Epoch] = (),
    inherit: Collection[str] = (),
    busy: Collection[str] = (),
) -> list[Verdict]:
    """Decide on every folder by owner and epoch, never by age.

    `owner` is the caller's own attempt, `ended` are attempts that are known to write no more, `inherit` the names that
    the launch token hands over, `busy` what is being written or read right now.
    """
    return [_judged(folder, owner, ended, inherit, busy) for folder in folders]


def _judged(
    folder: Folder,
    owner: Epoch | None,
    ended: Collection[Epoch],
    inherit: Collection[str],
    busy: Collection[str],
) -> Verdict:
    def verdict(collect: bool, reason: str) -> Verdict:
        return Verdict(folder=folder, collect=collect, reason=reason)

    attempt, nonce = folder.epoch
    if folder.name in busy:
        return verdict(False, "is being written")
    # Whoever buried it held the fence, and no reader has taken it for a checkpoint since.
    if folder.state is State.BURIED:
        return verdict(True, "its deletion was begun and not finished")
    if folder.epoch == owner:
        return verdict(True, "half-written by this attempt itself")
    if folder.name in inherit:
        return verdict(True, "handed over to this attempt, and not committed")
    if folder.epoch in ended:
        return verdict(True, f"half-written by attempt {attempt} ({nonce}), which has ended")
    return verdict(False, f"half-written by attempt {attempt} ({nonce}), which is not known to have ended")


def act(
    storage: Storage,
    verdicts: Sequence[Verdict],
    fence: Callable[[], bool],
    gone: Callable[[Folder], object] = lambda folder: None,
) -> list[str]:
    """Delete what was decided on; returns the names that are gone, fewer when the fence was lost.

    `gone` is told of each folder. One that cannot be deleted keeps none of the others; then raises its OSError.
    """
    names, errors = [], []
    for verdict in verdicts:
        if not verdict.collect:
            continue
        try:
            if not delete(storage, verdict.folder.name, fence):
                break
        except OSError as error:
            errors.append(error)
            continue
        names.append(verdict.folder.name)
        gone(verdict.folder)
    if errors:
        raise errors[0]
    return names


def epochs(texts: Iterable[str]) -> set[Epoch]:
    """What `<attempt>-<nonce>` stands for; anything else stands for nobody."""
    parts = [text.partition("-") for text in texts]
    return {(int(attempt), nonce) for attempt, _, nonce in parts if attempt.isdecimal() and nonce}


def delete(storage: Storage, name: str, fence: Callable[[], bool]) -> bool:
    """Delete one checkpoint or its remains; False when the fence was lost and nothing more was touched.

    The tombstone comes before anything is taken away and goes last of all files: after a crash at any point there is
    either a whole checkpoint, or a folder that no reader takes for one and that any collector knows as half-deleted.
    """
    files = storage.list(name)
    if COMMIT in files and DELETED not in files:
        if not fence():
            return False
        storage.publish(f"{name}/{DELETED}", _NOTE)
        files[DELETED] = len(_NOTE)
    for file in sorted(files, key=lambda file: (file == DELETED, file != COMMIT, file)):
        if not fence():
            return False
        storage.delete(f"{name}/{file}")
    if not fence():
        return False
    storage.delete(name)
    return True
