"""What the flusher and a transfer under way share: the newest commit, whether the run ends, and what is reported."""

import errno
from dataclasses import dataclass

from checkpointing.engine.ranks.failure import explain
from checkpointing.engine.ranks.peer_codec import peer_message
from checkpointing.event_sink import EmitEvent
from checkpointing.format.commit import parse_name
from checkpointing.format.manifest import Manifest
from checkpointing.tiers.tier import ResolvedTier


@peer_message
@dataclass(frozen=True)
class TransferFailure:
    """Why a checkpoint did not arrive; `stuck` when something gave no answer, `bad` when the source is damaged."""

    reason: str
    stuck: bool = False
    bad: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "TransferFailure":
        return cls(explain(error), stuck=isinstance(error, OSError) and error.errno == errno.ETIMEDOUT)


class FlushState:
    """Written by the flusher; `emit` does nothing on all ranks but rank 0."""

    def __init__(self, emit: EmitEvent) -> None:
        self._emit = emit
        self.latest: str | None = None
        """Name of the newest checkpoint that was committed in the first tier."""
        self.closing = False
        """Whether the run ends: copies under way are abandoned, and failures are no longer reported."""

    def report_arrival(self, tier: ResolvedTier, manifest: Manifest, seconds: float) -> None:
        facts = {"step": manifest.step, "name": manifest.name, "tier": tier.path}
        self._emit("checkpoint.flushed", {**facts, "bytes": manifest.size, "seconds": seconds})

    def report_failure(self, tier: ResolvedTier, failure: TransferFailure) -> None:
        if not self.closing:
            kind = "checkpoint.stuck" if failure.stuck else "checkpoint.failed"
            self._emit_of_latest(kind, tier, f"not copied to {tier.path}: {failure.reason}")

    def report_late(self, tier: ResolvedTier, first: ResolvedTier) -> None:
        """There was no time left to copy the newest checkpoint from the `first` tier."""
        reason = (
            f"the newest checkpoint is not known to be in {tier.path}: there was no time left to copy it from "
            f"{first.path}, where the next start finds it"
        )
        self._emit_of_latest("checkpoint.failed", tier, reason)

    def _emit_of_latest(self, kind: str, tier: ResolvedTier, reason: str) -> None:
        parts = parse_name(self.latest or "")
        self._emit(kind, {"step": parts.step if parts else 0, "reason": reason, "tier": tier.path})
