"""The error tree of checkpoints; knows nothing of runs or exit codes.

CheckpointError
 +- ManifestError     the manifest or COMMIT is torn, tampered with, or of another format
 +- Refused           one checkpoint cannot be trusted or does not fit; carries its name and the reason
 |   +- UnsafePickle  `.metadata` asks for a class that no checkpoint needs
 +- NothingVerifies   checkpoints exist and every one of them was refused
 |   +- NothingIntact  because every one of them is damaged: another try reads the same bytes
 |   +- NothingFits    because the others are of another model: another try has the same code
 |   +- UnreadableNow  the newest one cannot be read now: an older one would train its steps again
 +- TierUnavailable   the library for a tier's URL is not installed here
 +- SaveFailed        one save was given up; carries its step and the reason
     +- FencedOff     the attempt no longer holds its launch token, so it must not commit
     +- Unsound       these bytes must not be saved, however often that is tried
         +- Unsavable    nor any later state: the program keeps something that cannot be saved
"""

from collections.abc import Sequence


class CheckpointError(Exception):
    """Something about a checkpoint that its user should hear of."""


class ManifestError(CheckpointError):
    """A manifest or COMMIT that cannot be believed; the message begins with the file's name."""


class Refused(CheckpointError):
    """A checkpoint that must not be loaded.

    It is `damaged` unless that may be due to who wants it, where, or when: to a model that it does not fit, a node that
    does not have it, a file system that fails for a moment. Where it is the model, it does not `fit`. It is
    `unreadable` where reading raised nothing but errors that may pass.
    """

    def __init__(
        self, name: str, reason: str, damaged: bool = True, fits: bool = True, unreadable: bool = False
    ) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason, self.damaged, self.fits, self.unreadable = name, reason, damaged, fits, unreadable


class UnsafePickle(Refused):
    """A pickle that names anything outside the allow-list."""


class NothingVerifies(CheckpointError):
    """Every committed checkpoint was refused; `touched` says whether tensors were already written to."""

    def __init__(self, refusals: Sequence[Refused], *, touched: bool) -> None:
        told = "; ".join(str(refusal) for refusal in refusals)
        super().__init__(f"{len(refusals)} committed checkpoint(s), none of which can be loaded: {told}")
        self.refusals, self.touched = tuple(refusals), touched


class NothingIntact(NothingVerifies):
    """Every committed checkpoint is damaged."""


class NothingFits(NothingVerifies):
    """Every committed checkpoint that is not damaged is of another model."""


class UnreadableNow(NothingVerifies):
    """The newest checkpoint that is not refused for good cannot be read, at `places`; older ones were not tried."""

    def __init__(self, refusals: Sequence[Refused], places: Sequence[str]) -> None:
        super().__init__(refusals, touched=False)
        reasons = "; ".join(dict.fromkeys(refusal.reason for refusal in refusals))
        self.args = (
            f"{' and '.join(places)} cannot be read, and no older checkpoint is loaded instead (make it readable, or "
            f"give it up by moving it away): {reasons}",
        )


def nothing_verifies(refusals: Sequence[Refused], *, touched: bool) -> NothingVerifies:
    """The error for these refusals of all checkpoints that there are."""
    kind: type[NothingVerifies] = NothingVerifies
    if all(refusal.damaged for refusal in refusals):
        kind = NothingIntact
    elif all(refusal.damaged or not refusal.fits for refusal in refusals):
        kind = NothingFits
    return kind(refusals, touched=touched)


class SaveFailed(CheckpointError):
    """A save that left no checkpoint."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step, self.reason = step, reason


class FencedOff(SaveFailed):
    """A save that was stopped before COMMIT because another attempt owns the run by now."""


class Unsound(SaveFailed):
    """A save that was given up because of what was to be saved: it was torn, or cannot be saved as it is."""


class Unsavable(Unsound):
    """A state that no later save could save either: training on would only lose more."""


class TierUnavailable(CheckpointError, ImportError):
    """A tier whose library is not installed here."""
