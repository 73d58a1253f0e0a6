"""Levels 3 and 4 of verification: is the structure sound, and are the values what they should be?"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.engine.state.fingerprints import combine, partial
from checkpointing.engine.verification.structure import structure_faults
from checkpointing.engine.verification.values import Values
from checkpointing.errors import ManifestError, Refused
from checkpointing.format.index import FINGERPRINTS, INDEX, Index, Piece, parse_fingerprints
from checkpointing.format.manifest import MANIFEST, METADATA, Manifest
from checkpointing.storage.backends import LocalStorage, Storage
from checkpointing.storage.disk_errors import error_words
from checkpointing.verification.digest_scan import PageCacheState
from checkpointing.verification.verify import Fault, Progress, Report, read_listed, read_sealed, verify_in

AUDITS = {3: "structure", 4: "every value"}
_WANTED = {3: (INDEX,), 4: (INDEX, FINGERPRINTS)}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the owner of a checkpoint knows of it beyond its bytes."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Values that `extra` must have."""

    counts: tuple[str, ...] = ()
    """Keys of `extra` that must be whole numbers, 0 or more."""

    steps: str = ""
    """Pattern of keys whose values count optimizer steps: none is beyond the checkpoint's, one at least is at it."""

    left_out: int = 0
    """Steps that the optimizer was not asked to make: its counters are that far behind the checkpoint's step."""

    required: tuple[str, ...] = ()
    """Tensors that must be there."""

    readable: Mapping[str, Callable[[str, Tensor], str]] = field(default_factory=dict)
    """By the beginning of a key: says, of a key and its tensor, what is wrong; nothing when it can be used."""

    finite: tuple[str, ...] = ("",)
    """Beginnings of keys whose values must be numbers; elsewhere NaN and infinities may be meant, as in a mask."""


Expect = Callable[[Manifest], Expected]


def audit_in(
    storage: Storage, name: str, level: int, progress: Progress | None = None, expect: Expect | None = None
) -> Report:
    """Verify at level 3 or 4, after level 2 has found every byte as it was written.

    Levels build on each other: one that finds faults is the last. Values pass through memory shard by shard.
    """
    if level not in AUDITS:
        raise ValueError(f"audit level {level}: must be one of {sorted(AUDITS)}")
    start = time.monotonic()
    with _read_twice(storage, name) as before:
        report = verify_in(storage, name, 2, progress, before)
        faults, size, notes = list(report.faults), report.bytes, list[str]()
        if not faults:
            manifest, faults = read_sealed(storage, name)
            if manifest is not None and not faults:
                faults, read, seen = _audited(storage, manifest, level, progress, expect)
                size += read
                notes = [f"it has no {file}" for file in _WANTED[level] if manifest.file(file) is None] + seen
    return Report(
        ok=not faults, level=level, bytes=size, seconds=time.monotonic() - start, faults=tuple(faults),
        notes=tuple(notes),
    )  # fmt: skip


@contextmanager
def _read_twice(storage: Storage, name: str) -> Iterator[PageCacheState | None]:
    """Lets the page cache keep the files from one reading to the next; afterwards it is as it was before both."""
    if not isinstance(storage, LocalStorage):
        yield None
        return
    # What does not fit would only throw out what others need, and be gone itself when it is wanted again.
    before = PageCacheState(keeps=_bytes_in(storage, name) <= _available() // 4)
    try:
        yield before
    finally:
        before.drop_new_pages(storage.root / name)


def _bytes_in(storage: Storage, name: str) -> int:
    try:
        return sum(size or 0 for size in storage.list(name).values())
    except OSError:
        return 0  # verification says what is wrong


def _available() -> int:
    """Bytes of memory that the kernel could give away."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


def _audited(
    storage: Storage, manifest: Manifest, level: int, progress: Progress | None, expect: Expect | None
) -> tuple[list[Fault], int, list[str]]:
    try:
        index, faults = structure_faults(storage, manifest)
        if level < 4 or index is None or faults:
            return faults, 0, []
        expected = expect(manifest) if expect else Expected()
        faults = fact_faults(manifest, expected) + _absent(index, manifest, expected)
        found, read, notes = value_faults(storage, manifest, index, expected, progress)
        return faults + found, read, notes
    except Refused as refusal:
        return [Fault(file=MANIFEST, chunk=None, reason=refusal.reason)], 0, []
    except OSError as error:
        file = str(error.filename or manifest.name).rpartition("/")[2]
        return [Fault(file=file, chunk=None, reason=f"unreadable: {error_words(error)}")], 0, []


def fact_faults(manifest: Manifest, expected: Expected) -> list[Fault]:
    """Plain facts that are absent, of the wrong kind, or not what they should be."""
    reasons = []
    for key in expected.counts:
        value = manifest.extra.get(key)
        if type(value) is not int or value < 0:
            reasons.append(f"`{key}` is {value!r}, not a whole number")
    for key, wanted in expected.facts.items():
        value = manifest.extra.get(key)
        if value != wanted:
            reasons.append(f"`{key}` is {value!r}, where step {manifest.step} should have {wanted!r}")
    return [Fault(file=MANIFEST, chunk=None, reason=reason) for reason in reasons]


def _absent(index: Index, manifest: Manifest, expected: Expected) -> list[Fault]:
    file = INDEX if manifest.file(INDEX) else METADATA
    lacking = [key for key in expected.required if key not in index.tensors]
    return [Fault(file=file, chunk=None, reason=f"there is no tensor {key}", tensors=(key,)) for key in lacking]


def value_faults(
    storage: Storage, manifest: Manifest, index: Index, expected: Expected, progress: Progress | None = None
) -> tuple[list[Fault], int, list[str]]:
    """Load every value once and judge it; the faults, how many bytes were loaded, and what else was seen."""
    known, faults = _fingerprints(storage, manifest, index)
    with Values(storage, manifest, index) as values:
        judge = _Judge(manifest, values, expected, known, progress)
        for key in values.in_file_order():
            faults += judge.tensor(key)
        faults += judge.counters()
        return faults, judge.done, judge.notes


class _Judge:
    """Fingerprints, NaN and infinities, counters of steps, and what the owner can read: tensor by tensor."""

    def __init__(
        self, manifest: Manifest, values: Values, expected: Expected, known: Mapping[str, str] | None,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self._manifest, self._values, self._expected, self._known = manifest, values, expected, known
        self._progress, self.done = progress, 0
        self._total = sum(piece.nbytes for piece in values.index.pieces)
        self._counts = re.compile(expected.steps or r"(?!)")
        self._steps: dict[str, float] = {}
        self.notes: list[str] = []

    def tensor(self, key: str) -> Iterator[Fault]:
        """What is wrong with one tensor."""
        examined = _Examined(self._values.index.tensors[key].shape)
        for piece in self._values.pieces(key):
            before = examined.wild
            for block, offsets in self._values.blocks(piece):
                examined.take(block, offsets)
                self.done += block.nbytes
                if self._progress:
                    self._progress(self.done, self._total)
            if examined.wild > before and key.startswith(self._expected.finite):
                yield self._fault(key, f"{examined.wild - before} values are NaN or infinite", piece)
        if examined.wild and not key.startswith(self._expected.finite):
            self.notes.append(f"{key}: {examined.wild} values are NaN or infinite, in a tensor that does not train")
        if self._known is not None and self._known.get(key) != examined.fingerprint:
            yield self._fault(key, f"fingerprint is {examined.fingerprint}, at save it was {self._known.get(key)}")
        if self._counts.fullmatch(key):
            self._steps[key] = float(self._values.rows(key, 0, 1).flatten()[0])
        for beginning, judge in self._expected.readable.items():
            if key.startswith(beginning):
                reason = judge(key, self._values.rows(key, 0, self._values.row_count(key)))
                yield from [self._fault(key, reason)] if reason else []

    def counters(self) -> Iterator[Fault]:
        """What is wrong with the optimizer's counters, seen together."""
        for key, reason in step_reasons(self._steps, self._manifest.step, self._expected.left_out):
            yield self._fault(key, reason)

    def _fault(self, key: str, reason: str, piece: Piece | None = None) -> Fault:
        """With the file and chunk where the values, or the first of them, lie."""
        piece = piece or next(iter(self._values.pieces(key)), None)
        entry = self._manifest.file(piece.file) if piece else None
        if piece is None or entry is None:
            return Fault(file=INDEX, chunk=None, reason=reason, tensors=(key,))
        return Fault(file=entry.name, chunk=piece.data // entry.chunk_size, reason=reason, tensors=(key,))


class _Examined:
    """What is learned about one tensor while its blocks pass by."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape, self._parts = shape, list[tuple[int, int]]()
        self.wild = 0

    def take(self, block: Tensor, offsets: tuple[int, ...]) -> None:
        self._parts.append(partial(block, offsets, self._shape))
        if block.is_floating_point() or block.is_complex():
            # float8 has no test of its own for infinities.
            seen = block.float() if block.is_floating_point() and block.itemsize == 1 else block
            self.wild += int(block.numel() - torch.isfinite(seen).sum())

    @property
    def fingerprint(self) -> str:
        return combine(self._parts)


def _fingerprints(storage: Storage, manifest: Manifest, index: Index) -> tuple[dict[str, str] | None, list[Fault]]:
    """Those taken at save; None when the checkpoint has none."""
    if manifest.file(FINGERPRINTS) is None:
        return None, []
    try:
        known = parse_fingerprints(read_listed(storage, manifest, FINGERPRINTS))
    except ManifestError as error:
        return None, [Fault(file=FINGERPRINTS, chunk=None, reason=str(error))]
    extra = sorted(known.keys() - index.tensors.keys())
    reason = "has a fingerprint, but there is no such tensor"
    return known, [Fault(file=FINGERPRINTS, chunk=None, reason=f"{key} {reason}", tensors=(key,)) for key in extra]


def step_reasons(steps: Mapping[str, float], step: int, left_out: int = 0) -> list[tuple[str, str]]:
    """Counters of updates that cannot belong to a checkpoint of `step`; a parameter may have had fewer."""
    made, told = step - left_out, f", {left_out} of which were left out" if left_out else ""
    ahead = [(key, value) for key, value in sorted(steps.items()) if not value <= made]
    if ahead:
        return [(key, f"counts {value:g} optimizer steps in a checkpoint of step {step}{told}") for key, value in ahead]
    if steps and max(steps.values()) < made:
        key = max(steps, key=lambda key: steps[key])
        least = f"no parameter has had more than {steps[key]:g} optimizer steps"
        return [(key, f"{least}, the checkpoint is of step {step}{told}")]
    return []
