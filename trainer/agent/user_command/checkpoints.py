"""Checkpoints of a user's own program: groups a folder's entries into checkpoints and checks these for damage.
Programs write a file per rank, or one for the model and one for the optimizer. All files of one step form one
checkpoint, since ranks that load different steps silently train a mixture.
"""

import os
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from json import JSONDecodeError, JSONDecoder, detect_encoding
from pathlib import Path
from stat import S_ISDIR

from checkpointing.format.safetensors import Malformed, check_length
from checkpointing.storage.durable import open_regular
from trainer.protocol.checkpoint_seal import BESIDE
from trainer.protocol.command_progress import SET_ASIDE, CommandCheckpointsConfig, parse_digits
from trainer.protocol.failures.outcome import legible

_NUMBER = re.compile(r"\d+", re.ASCII)
_RANK = re.compile(r"(?<![a-z])(rank[-_=]?)(\d+)", re.IGNORECASE | re.ASCII)
_TEMPORARY = re.compile(r"(?<![a-z])(tmp|temp|partial|incomplete|lock|bak|old)(?![a-z])", re.IGNORECASE)
"""Words in the names of files that an interrupted save leaves behind and that belong to no checkpoint."""


def group(names: Collection[str], config: CommandCheckpointsConfig, most: int) -> list[tuple[int, str, list[str]]]:
    """Return the newest checkpoints, newest first: the step, an entry matching the pattern, and the other entries'
    names.
    """
    matched: dict[int, list[str]] = defaultdict(list)
    for name in sorted(names):
        if (step := config.parse_step(name)) is not None:
            matched[step].append(name)
    steps = sorted(matched, reverse=True)
    numbered = _map_steps(names, steps[: most + 1], config)
    return [
        (step, matched[step][0], _siblings(matched[step][0], step, numbered, steps[at + 1 : at + 2], config))
        for at, step in enumerate(steps[:most])
    ]


def _map_steps(
    names: Iterable[str], steps: Collection[int], config: CommandCheckpointsConfig
) -> dict[int, list[str]]:  # fmt: skip
    """Map each step to the names that contain it."""
    found: dict[int, list[str]] = {step: [] for step in steps}
    words = len(_TEMPORARY.findall(config.pattern))
    for name in names:
        if name.startswith(SET_ASIDE) or len(_TEMPORARY.findall(name)) > words:
            continue
        # The pattern may capture only part of a number as the step.
        for number in found.keys() & {config.parse_step(name), *map(parse_digits, _NUMBER.findall(name))}:
            found[number].append(name)
    return found


def _siblings(
    main: str, step: int, numbered: Mapping[int, list[str]], older: Collection[int], config: CommandCheckpointsConfig
) -> list[str]:
    prefix = config.name_prefix(main)
    # A name whose first number is the step belongs to it if all steps have one: `optimizer-30.pt` for `model-30.pt`.
    alone = not _NUMBER.search(prefix)
    forms = {_form(name, number) for number in older for name in numbered[number]} if alone else set()
    ranks = same_but_for_rank(main, numbered[step])
    return sorted(
        name for name in numbered[step]
        if name != main and config.parse_step(name) in (None, step) and (
            config.parse_step(name) == step
            or _begins(name, prefix, step)
            or name in ranks
            or ((form := _form(name, step)) and form in forms)
        )
    )  # fmt: skip


def _begins(name: str, prefix: str, step: int) -> bool:
    digits = _NUMBER.match(name, len(prefix))
    return name.startswith(prefix) and digits is not None and parse_digits(digits[0]) == step


def _form(name: str, step: int) -> str:
    """Return the name without its first number, provided that this is the step; otherwise ""."""
    first = _NUMBER.search(name)
    if first is None or parse_digits(first[0]) != step:
        return ""
    return f"{name[: first.start()]}#{name[first.end() :]}"


def has_rank(name: str) -> bool:
    """Return whether a name appears to contain a rank number."""
    return _RANK.search(name) is not None


def same_but_for_rank(name: str, others: Iterable[str]) -> list[str]:
    """Return the names that differ from this one only in the rank number, if rank 0 is among them.
    Without a rank 0 the number has a different meaning, as in `lora-rank8` and `lora-rank16`.
    """
    if not has_rank(name):
        return []
    alike = [other for other in others if _RANK.sub(r"\1#", other) == _RANK.sub(r"\1#", name)]
    has_first = any(int(number) == 0 for each in (name, *alike) for _, number in _RANK.findall(each))
    return sorted(other for other in alike if other != name) if has_first else []


def find_digits(name: str, step: int) -> str:
    """Return the last occurrence of the step in a name, as written, or the step itself if there is none."""
    return next((digits for digits in reversed(_NUMBER.findall(name)) if parse_digits(digits) == step), str(step))


def counterpart(name: str, main: str, other_main: str, others: Iterable[str]) -> str | None:
    """Return another step's entry that corresponds to this one, such as the same rank's, or None if none does.
    `main` and `other_main` are the entries that the pattern matches; wherever their numbers differ, as in the step, the
    numbers of the two entries may differ too.
    """
    if not is_alike(main, other_main):
        return None
    free = _differences(main, other_main)
    alike = [other for other in others if is_alike(name, other) and _differences(name, other) <= free]
    return min(alike, key=lambda other: len(_differences(name, other)), default=None)


def _differences(name: str, other: str) -> set[int]:
    pairs = zip(_NUMBER.findall(name), _NUMBER.findall(other), strict=True)
    return {at for at, (one, two) in enumerate(pairs) if int(one) != int(two)}


def is_alike(name: str, other: str) -> bool:
    """Return whether two names differ only in their numbers."""
    return _NUMBER.sub("#", name) == _NUMBER.sub("#", other)


Stamps = dict[str, int]
"""Identity -> time of the last change (ns) before the run's first start."""
_MOST, _MOST_ENTRIES = 1000, 100


def scan_identities(folder: Path) -> dict[str, str]:
    """Return each entry's identity, keyed by name, or an empty dict if the folder is missing. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: f"{entry.name}.{entry.inode():x}" for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def record_earlier(folder: Path, config: CommandCheckpointsConfig) -> Stamps:
    """Return the checkpoints that exist now, limited to those with the highest steps. Raises OSError."""
    there = scan_identities(folder)
    steps = {name: config.parse_step(name) for name in there}
    newest = sorted((step, name) for name, step in steps.items() if step is not None)[-_MOST:]
    return {there[name]: _newest_change(folder / name) for _, name in newest}


def leave_out_earlier(
    folder: Path, there: Mapping[str, str], config: CommandCheckpointsConfig, earlier: Stamps
) -> tuple[dict[str, str], set[str]]:
    """Return all entries except earlier checkpoints above the run's newest one, and the names of all earlier ones.
    A checkpoint that has changed since the first start is the run's own. Raises OSError.
    """
    steps = {name: step for name in there if (step := config.parse_step(name)) is not None}
    old = {name for name in steps if there[name] in earlier}
    newest = max((step for name, step in steps.items() if name not in old), default=-1)
    for name in sorted(old, key=lambda name: steps[name], reverse=True):
        if steps[name] <= newest:
            break
        if _newest_change(folder / name) != earlier[there[name]]:
            old.remove(name)
            newest = steps[name]
    above = {name for name in old if steps[name] > newest} if newest >= 0 else set()
    return {name: identity for name, identity in there.items() if name not in above}, old


def _newest_change(path: Path) -> int:
    """Return when an entry, or anything within it that is readable, last changed. Raises OSError."""
    times = [path.lstat().st_mtime_ns]
    with suppress(OSError):
        times += [os.lstat(entry).st_mtime_ns for entry in islice(_entries(path), _MOST_ENTRIES)]
    return max(times)


def _entries(folder: Path) -> Iterator[str]:
    for at, folders, names in os.walk(folder):
        yield from (os.path.join(at, name) for name in (*folders, *names))


MOST = 20
"""Maximum number of checkpoints read; for older ones, only the names are known."""
_MOST_FILES, _MOST_FOLDERS = 2000, 2000
_LARGEST = 64 << 20
ARCHIVES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".npz"})
_WEIGHTS = frozenset({".safetensors", ".distcp", ".json", ".pkl", ".npy", *ARCHIVES})
"""Suffixes of files that are never empty in a complete checkpoint, except markers."""
_MARKERS = frozenset({".bin", ".json", ".pkl"})
"""Suffixes also used for empty markers, and for the files of a rank that has nothing to write."""
GARBLED = (NotImplementedError, struct.error, ValueError, OverflowError, EOFError, LookupError, MemoryError)
"""Raised by zipfile for a directory with garbled numbers."""
_INCOMPLETE = "checkpoint-is-incomplete.txt"
"""Left by Hugging Face's Trainer in a checkpoint that it had no time to finish; the Trainer ignores it when loading."""

Files = dict[str, tuple[int, int]]
"""Name relative to the checkpoint's path (empty: a file itself) -> size in bytes and time of the last change (ns)."""


@dataclass(frozen=True, kw_only=True)
class CommandCheckpoint:
    """Checkpoint of a user program.
    `identity` distinguishes it from a later one with the same name; `damage` is the reason why it is incomplete.
    """

    step: int
    path: Path
    identity: str
    files: Files
    siblings: tuple[str, ...] = ()  # names of other entries in its folder that belong to it
    earlier: bool = False  # it existed before the run's first start and has not changed since
    cut: bool = False  # it has more files than listed
    damage: str = ""
    lacking: bool = False  # `damage` is just a missing file, which is weak evidence
    proven: bool = False  # its framework's own rules show the damage

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    @property
    def parts(self) -> int:
        """Return how many of the checkpoint's entries have similar names, as entries from different ranks do."""
        return 1 + sum(is_alike(name, self.path.name) for name in self.siblings)

    def place(self, name: str) -> Path:
        """Return the path of one of its `files`."""
        if name.startswith(BESIDE):
            return self.path.parent / name.removeprefix(BESIDE)
        return self.path / name if name else self.path


def find(
    folder: Path, config: CommandCheckpointsConfig, earlier: Stamps | None = None
) -> tuple[list[CommandCheckpoint], set[str]]:
    """Return the newest checkpoints, newest step first, and all identities. A missing folder has neither.
    Raises OSError if the folder cannot be read.
    """
    there = scan_identities(folder)
    entries, old = leave_out_earlier(folder, there, config, earlier or {})
    grouped = group(entries, config, MOST)
    found = [_read(folder / name, step, entries[name], siblings) for step, name, siblings in grouped]
    identities = {identity for name, identity in there.items() if config.parse_step(name) is not None}
    return [replace(one, earlier=one.path.name in old) for one in found if one is not None], identities


def find_other_rank(folder: Path) -> str:
    """If this folder is, or is in, one rank's folder, return that of another rank, which is not examined. Return ""
    otherwise. Raises OSError.
    """
    for place in (folder, *folder.parents):
        if has_rank(place.name) and (others := same_but_for_rank(place.name, scan_identities(place.parent))):
            return str(place.parent / others[0])
    return ""


def find_written_later(found: Sequence[CommandCheckpoint], config: CommandCheckpointsConfig) -> str:
    """Return the name of a checkpoint that is newer, by its name and files, than the highest step's, or "" if none is.
    If steps restart, as in a second training stage, they do not reveal which checkpoint the program loads.
    """
    entries = [entry for one in found for entry in _dated_entries(one, config)]
    for name, numbers, written in entries[1:]:
        if numbers > entries[0][1] and written > entries[0][2]:
            return name
    return ""


def _dated_entries(one: CommandCheckpoint, config: CommandCheckpointsConfig) -> Iterator[tuple[str, list[int], int]]:
    """Yield matching names, with the numbers before the step and the time of the oldest file (ns).
    The oldest counts because files such as results may be added later.
    """
    for name in (one.path.name, *one.siblings):
        if config.parse_step(name) is not None:
            numbers = [int(number) for number in _NUMBER.findall(config.name_prefix(name))]
            own = [changed for file, (_, changed) in one.files.items() if _entry_name(file, one) == name]
            yield name, numbers, min(own, default=0)


def _entry_name(file: str, one: CommandCheckpoint) -> str:
    return file.removeprefix(BESIDE).partition("/")[0] if file.startswith(BESIDE) else one.path.name


def read_again(one: CommandCheckpoint, config: CommandCheckpointsConfig) -> CommandCheckpoint | None:
    """Return the checkpoint's current state, without assessing damage, or None if it is gone. Raises OSError."""
    there = scan_identities(one.path.parent)
    up_to = [name for name in there if (step := config.parse_step(name)) is None or step <= one.step]
    for step, name, siblings in group(up_to, config, 1):
        if (step, there[name]) == (one.step, one.identity):
            return _read(one.path, step, one.identity, siblings)
    return None


def _read(path: Path, step: int, identity: str, siblings: Sequence[str]) -> CommandCheckpoint | None:
    try:
        files, cut = _read_entry(path)
        if "" not in files and not path.is_dir():
            return None
        for name in siblings:
            found, more = _read_entry(path.parent / name)
            files.update({f"{BESIDE}{name}{'/' if inside else ''}{inside}": state for inside, state in found.items()})
            cut = cut or more
    except OSError:  # deleted by the program in the meantime, or unreachable
        return None
    return CommandCheckpoint(
        step=step, path=path, identity=identity, files=files, siblings=tuple(siblings), cut=cut
    )  # fmt: skip


def _read_entry(path: Path) -> tuple[Files, bool]:
    """Return a folder's files, or the file itself, and whether there are more. Raises OSError."""
    found, cut = _list_folder(path) if path.is_dir() else ([path], False)
    states = [(file, _state(file)) for file in found[:_MOST_FILES]]
    files = {"" if file == path else str(file.relative_to(path)): state for file, state in states if state is not None}
    return files, cut or (bool(found) and not files)


def _state(file: Path) -> tuple[int, int] | None:
    """Return size and change time, or None for a symbolic link to a folder or to nothing.
    Raises OSError if the file is gone.
    """
    try:
        known = file.stat()
    except OSError:
        if file.is_symlink():
            return None
        raise
    return None if S_ISDIR(known.st_mode) else (known.st_size, known.st_mtime_ns)


def _list_folder(folder: Path) -> tuple[list[Path], bool]:
    """Return the files and symbolic links in a folder, and whether there are more than the limits allow.
    Raises OSError for an unreadable folder, since it may not be empty.
    """

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for count, (at, folders, names) in enumerate(os.walk(folder, onerror=refuse)):
        found += (Path(at, name) for name in (*names, *(one for one in folders if Path(at, one).is_symlink())))
        if len(found) > _MOST_FILES or count > _MOST_FOLDERS:
            return found, True
    return found, False


def assess_damage(found: list[CommandCheckpoint], most: int = 4) -> list[CommandCheckpoint]:
    """Return the checkpoints, with damage assessed for the newest `most` of them."""
    filled = {kind for one in found[:most] for kind in _kinds(one, filled=True)}
    judged = [replace(one, damage=damage(one, filled)) for one in found[:most]]
    whole = [one for one in judged if not one.damage]
    for at, one in enumerate(judged):
        if reason := "" if one.damage else _lacks(one, [other for other in whole if other in judged[at + 1 :]]):
            judged[at] = replace(one, damage=reason, lacking=True)
    return [*judged, *found[most:]]


def damage(one: CommandCheckpoint, filled: Collection[str]) -> str:
    """Return a sign, found cheaply, that this checkpoint cannot be complete, or "" if there is none.
    `filled` lists the kinds of files that are non-empty in some checkpoint of the run.
    """
    if one.files.keys() & {_INCOMPLETE, *(f"{BESIDE}{name}/{_INCOMPLETE}" for name in one.siblings)}:
        return f"is marked as incomplete by {_INCOMPLETE}"
    if not one.cut and all(name.startswith(BESIDE) for name in one.files):
        return "is an empty folder"
    # torch.distributed.checkpoint writes this file last.
    if not one.cut and (name := next((name for name in sorted(one.files) if _lacks_metadata(name, one)), "")):
        return legible(f"is damaged: .metadata is missing beside {name.removeprefix(BESIDE)}")
    read_metadata = cache(_read_metadata)  # read once for all ranks
    for name in sorted(one.files):
        if one.files[name][0] == 0 and _may_be_empty(one, name, filled, read_metadata):
            continue
        if reason := _torn(one.place(name), one.files[name][0]):
            return legible(f"is damaged: {name.removeprefix(BESIDE) or one.path.name} {reason}")
    return ""


def _may_be_empty(
    one: CommandCheckpoint, name: str, filled: Collection[str], read_metadata: Callable[[Path], bytes]
) -> bool:
    """Return whether this file may be empty in a complete checkpoint."""
    # torch writes one file per rank, and its metadata names those with content.
    if name.endswith(".distcp"):
        return os.fsencode(Path(name).name) not in read_metadata(one.place(name).parent)
    # A marker is empty in all checkpoints; among several files of one kind, some ranks may have nothing to write.
    return Path(name).suffix in _MARKERS and (_kind(name) not in filled or _kind(name) in _kinds(one, filled=True))


def _lacks_metadata(name: str, one: CommandCheckpoint) -> bool:
    return name.endswith(".distcp") and f"{name.rpartition('/')[0]}/.metadata".lstrip("/") not in one.files


def _read_metadata(folder: Path) -> bytes:
    """Return torch.distributed.checkpoint's pickled metadata for its files, or b"" if it cannot be read."""
    try:
        with open_regular(folder / ".metadata") as stream:
            return stream.read(_LARGEST)
    except OSError:
        return b""


def _lacks(one: CommandCheckpoint, older: Sequence[CommandCheckpoint]) -> str:
    """Return a kind of file that the two newest complete older checkpoints have but this one lacks, or "" if none. A
    kind that only one of those has was added later, such as an export or evaluation results.
    """
    if len(older) < 2 or one.cut or older[0].cut or older[1].cut:
        return ""
    here, first, second = map(_kinds, (one, older[0], older[1]))
    missing = sorted(first[kind] for kind in first.keys() & second.keys() - here.keys())
    if not missing:
        return ""
    lacks = missing[0].removeprefix(BESIDE)
    return legible(f"lacks {lacks}, which {older[0].path.name} and {older[1].path.name} have")


def _kinds(one: CommandCheckpoint, *, filled: bool = False) -> dict[str, str]:
    """Return one file name for each kind. If `filled`, omit empty files."""
    return {_kind(name): name for name in sorted(one.files) if one.files[name][0] or not filled}


def _kind(name: str) -> str:
    """Return the name without its numbers, such as those of rank, shard and step."""
    return _NUMBER.sub("#", name)


def _torn(file: Path, size: int) -> str:
    if size == 0:
        return "is empty" if file.suffix in _WEIGHTS else ""
    try:
        if file.suffix == ".safetensors":
            with open_regular(file) as stream:
                check_length(stream, size)
        elif file.suffix in ARCHIVES:
            return _cut_archive(file)
        elif file.suffix == ".json" and size <= _LARGEST:
            return _cut_json(file)
    except Malformed as error:
        return f"is not a complete safetensors file: {error}"
    except OSError:  # an I/O error proves nothing about the bytes
        return ""
    return ""


def _cut_json(file: Path) -> str:
    """Return a sign that a JSON text is truncated: an early end, or zeros that were never written.
    Other errors prove nothing: programs read JSON with comments, several documents and other encodings.
    """
    with open_regular(file) as stream:
        data = stream.read()
    try:
        text = data.decode(detect_encoding(data))
        if text.strip():
            JSONDecoder().decode(text)
    except JSONDecodeError as error:
        ended = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        zeros = text[error.pos : error.pos + 1] == "\0"
        return "is not a complete JSON file" if (ended or zeros) and not _is_json_lines(text) else ""
    except UnicodeDecodeError as error:
        return "is not a complete JSON file" if error.end == len(data) and "end" in error.reason else ""
    except (RecursionError, MemoryError) as error:
        return f"is not a readable JSON file: {type(error).__name__}"
    return ""


def _is_json_lines(text: str) -> bool:
    """Return whether the first line is complete JSON; no line of a single truncated document is."""
    first, newline, _ = text.partition("\n")
    try:
        JSONDecoder().decode(first)
    except (ValueError, RecursionError):
        return False
    return bool(newline)


def _cut_archive(file: Path) -> str:
    """Return a sign that a torch.save archive is truncated.
    It is a zip with its directory at the end; older formats are skipped.
    """
    with open_regular(file) as stream:
        if (beginning := stream.read(4)) != b"PK\x03\x04":
            is_zeros = beginning == bytes(4) and file.suffix != ".bin"  # raw numerical data may begin with zeros
            return "begins with zeros, which no format does" if is_zeros else ""
        try:
            zipfile.ZipFile(stream).close()
        except zipfile.BadZipFile:
            return "is not a complete torch.save archive: its directory is missing, so it was truncated"
        except GARBLED as error:
            return f"is not a complete torch.save archive: cannot read its directory: {type(error).__name__}"
    return ""
