"""Configuration of faults that are injected on purpose, to see a run recover."""

from dataclasses import dataclass

KINDS = {
    "kill-rank": "SIGKILL to itself",
    "stop-rank": "SIGSTOP to itself",
    "raise": "an exception in the training loop",
    "slow-rank": "more work in this step and every later one",
    "hang-in-data": "waits while it loads its batch",
    "hang-in-forward": "sleeps in the forward pass",
    "hang-in-save": "waits in a save",
    "hang-in-collective": "leaves a collective out for good: its peers wait in it",
    "hold-lock": "never gives Python's lock back",
    "desync-shape": "calls the next collective with a tensor of another shape",
    "desync-order": "calls its collectives in another order than its peers",
    "nan": "the loss of this step is NaN",
    "spike": "the loss of this step is a thousand times too large",
    "hang-in-send": "of a pipeline: stands still before it sends another stage what it has computed",
    "skip-send": "of a pipeline: leaves one message to another stage out, and goes on",
}
"""Every kind of fault a rank can bring upon itself; cells hold their places, so new ones come last."""
BETWEEN_STAGES = ("hang-in-send", "skip-send")
"""Kinds that need a pipeline."""


@dataclass(frozen=True, kw_only=True)
class DrillEvent:
    """One injected fault."""

    kind: str = "kill-rank"
    """The fault; docs/watching.md lists the kinds."""
    rank: int = 0
    """The rank it hits."""
    step: int = 1
    """The step in which it occurs; `kill-rank`, `stop-rank` and `raise` occur after it."""
    attempt: int = 1
    """Only in this attempt; 0: in every one."""
    generation: int = 1
    """Only in this generation of the attempt; 0: in every one."""
    value: float = 0.0
    """For `slow-rank`: seconds of work added to every step. For `hang-` kinds and `hold-lock`: seconds; 0: forever. For
    `desync-shape`: elements of the wrong tensor; 0: one."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"drill.events: kind={self.kind} must be one of {', '.join(KINDS)}")


@dataclass(frozen=True, kw_only=True)
class DrillConfig:
    """Faults injected on purpose, to see the run recover."""

    events: tuple[DrillEvent, ...] = ()
    """The faults; each occurs once."""
