"""The checkpoint error tree, which is independent of runs and exit codes.

CheckpointError
 +- ManifestError     the manifest or COMMIT is torn, tampered with, or of another format
 +- CheckpointRefused  one checkpoint cannot be trusted or does not fit; carries its name and the reason
 |   +- UnsafePickle  `.metadata` requests a class outside the allow-list
 +- NothingVerifies   checkpoints exist, but every one of them was refused
 |   +- NothingIntact  all of them are damaged: another attempt would read the same bytes
 |   +- NothingFits    the undamaged ones belong to another model: another attempt would run the same code
 |   +- UnreadableNow  the newest one cannot be read now: loading an older one would mean repeating steps
 +- TierUnavailable   the library for a tier's URL is not installed on this machine
 +- SaveFailed        one save was given up on; carries its step and the reason
     +- FencedOff     the attempt no longer holds its launch token, so it must not commit
     +- Unsound       this state must not be saved, even if the save is retried
         +- UnsavableState  no later state can be saved either: the program holds an object that cannot be saved
"""

from collections.abc import Sequence


class CheckpointError(Exception):
    """Base class of checkpoint errors that are reported to the user."""


class ManifestError(CheckpointError):
    """A manifest or COMMIT that cannot be trusted; the message begins with the file's name."""


class CheckpointRefused(CheckpointError):
    """A checkpoint that must not be loaded.

    It counts as `damaged` unless the cause may lie elsewhere: a model that it does not fit, a node that does not have
    it, or a transient file system error. `fits` is False if it belongs to another model. It is `unreadable` if reading
    it raised only transient errors.
    """

    def __init__(
        self, name: str, reason: str, damaged: bool = True, fits: bool = True, unreadable: bool = False
    ) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason, self.damaged, self.fits, self.unreadable = name, reason, damaged, fits, unreadable


class UnsafePickle(CheckpointRefused):
    """A pickle that names anything outside the allow-list."""


class NothingVerifies(CheckpointError):
    """Every committed checkpoint was refused. No tensor has been overwritten."""

    def __init__(self, refusals: Sequence[CheckpointRefused]) -> None:
        reasons = "; ".join(str(refusal) for refusal in refusals)
        super().__init__(f"{len(refusals)} committed checkpoint(s), none of which can be loaded: {reasons}")
        self.refusals = tuple(refusals)


class NothingIntact(NothingVerifies):
    """Every committed checkpoint is damaged."""


class NothingFits(NothingVerifies):
    """Every undamaged committed checkpoint belongs to another model."""


class UnreadableNow(NothingVerifies):
    """The newest checkpoint that is not permanently refused cannot be read from `places`. Older ones were not tried."""

    def __init__(self, refusals: Sequence[CheckpointRefused], places: Sequence[str]) -> None:
        super().__init__(refusals)
        reasons = "; ".join(dict.fromkeys(refusal.reason for refusal in refusals))
        self.args = (
            f"{' and '.join(places)} cannot be read, and no older checkpoint is loaded instead (make it readable, or "
            f"move it away to give it up): {reasons}",
        )


def nothing_verifies(refusals: Sequence[CheckpointRefused]) -> NothingVerifies:
    """Return the error that sums up the refusals of all existing checkpoints."""
    kind: type[NothingVerifies] = NothingVerifies
    if all(refusal.damaged for refusal in refusals):
        kind = NothingIntact
    elif all(refusal.damaged or not refusal.fits for refusal in refusals):
        kind = NothingFits
    return kind(refusals)


class SaveFailed(CheckpointError):
    """A save that left no checkpoint."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step, self.reason = step, reason


class FencedOff(SaveFailed):
    """A save that was stopped before COMMIT because another attempt now owns the run."""


class Unsound(SaveFailed):
    """A save that was given up on because its state was torn or cannot be saved in its present form."""


class UnsavableState(Unsound):
    """A state that no later save can write either; further training would only lose more work."""


class TierUnavailable(CheckpointError, ImportError):
    """A tier that needs a library that is not installed on this machine."""
