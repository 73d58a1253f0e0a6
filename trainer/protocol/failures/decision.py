"""Decision after a failure, for the policy within an attempt and the policy between attempts."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainer.protocol.failures.outcome import Failure
from trainer.protocol.skipped_batches import Skip


class Action(StrEnum):
    """Next action of the coordinator within an attempt (WAIT to END), or of the controller after an attempt."""

    WAIT = "WAIT"
    FINISH = "FINISH"
    STOP = "STOP"
    RESTART = "RESTART"  # in place
    ROLL_BACK = "ROLL_BACK"  # restart in place, skipping a batch
    REPLACE = "REPLACE"  # replace a lost node with a spare
    END = "END"  # the attempt has failed
    RETRY = "RETRY"
    SUCCEED = "SUCCEED"
    FAIL = "FAIL"
    HOLD = "HOLD"
    CANCEL = "CANCEL"


@dataclass(frozen=True, kw_only=True)
class CommandFailure:
    """A command's failure in one generation, and its progress up to then."""

    mark: str  # equal for failures with the same cause
    seconds: float  # seconds since it was started
    written: int  # bytes in the log of the rank that failed first
    exception: str | None = None
    crashed: bool = False  # ended by a signal
    saved: bool = False  # is known to have saved a checkpoint since it was started
    trained: bool = False  # is known to have saved, or ran for longer than startup takes
    loading: bool = False  # failed while loading a file
    began_from: str = ""  # identity of the newest checkpoint when it was started; empty: none, or unknown


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Next action, its reason and, for failures, the root cause."""

    action: Action
    reason: str
    failure: Failure | None = None
    mark: str = ""  # identifies the failure for comparison with the next one
    suspect: int | None = None  # step whose checkpoints must not be restored from now on
    skip: Skip | None = None  # batch to skip from now on
    own: CommandFailure | None = None  # for a command: its own failure
    set_aside: str = ""  # for a command: why its newest checkpoint must not be loaded again
    tries: int = 0  # for a command: number of failures soon after starting from a checkpoint that is retried
    outside: bool = False  # the network or a server failed, and may take a while to recover
    pause: float = 0.0  # seconds before the next generation
    lost: tuple[str, ...] = ()  # nodes to be replaced by spares
    not_before: float = 0.0  # start of the next attempt, in seconds since the epoch
    exclude: tuple[str, ...] = ()  # nodes that the next attempt avoids

    @property
    def known_failure(self) -> Failure:
        """Return the failure, which must exist."""
        assert self.failure is not None
        return self.failure

    @property
    def retry(self) -> bool:
        """Return whether the same nodes may be tried again."""
        return self.action is Action.RESTART

    def to_json(self) -> dict[str, Any]:
        """Return the stored form of a decision between attempts."""
        return {
            "action": str(self.action), "reason": self.reason, "not_before": self.not_before,
            "exclude": list(self.exclude),
        }  # fmt: skip
