"""PURE: whether a difference between a test's steps and those of its run proves anything about the checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

CODE = "code.user"
STATE_ELSEWHERE = (
    "no fault was found in the checkpoint: the steps of this workload depend on something that no checkpoint has, "
    "or do not repeat"
)
_SUMS_ONLY = frozenset({"threads", "cpu", "cpu_model", "kernel_settings"})
"""Software facts that, like another layout, only change the order of sums."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Numerical conditions of a restore test, compared with those of its run."""

    same_layout: bool
    repeats: bool
    """Whether equal inputs give equal bits on this device."""
    built_in: bool
    promises_equality: bool
    """Whether the program declares deterministic kernels and its data has a fingerprint."""
    has_agreed: bool
    """Whether a checkpoint of the run was restored before, on this layout, with equal steps."""
    experts: int = 0
    dtype: str = "float32"
    drawn: bool = False
    """Whether the steps drew random numbers."""
    differs: Collection[str] = ()
    """Identity fields (code.user, env.torch) that differ from the run's."""
    software: Mapping[str, Any] = field(default_factory=dict)
    """Software of the checkpoint that differs from the present one."""

    @property
    def exact(self) -> bool:
        """Whether the test must reproduce the run bit for bit."""
        return self.same_layout and self.repeats and not self.software and not self.differs


def why_not_compared(now: Conditions) -> str:
    """Return why the steps cannot be compared with the run's; empty if they can."""
    if CODE in now.differs:
        return "the run's own code (code.user) has changed since it trained: its steps are not compared"
    if now.drawn and not now.same_layout:
        return "it draws random numbers, other ones on another layout: its steps are not compared"
    return ""


def why_no_verdict(now: Conditions) -> str:
    """Return why a difference proves nothing about the checkpoint; empty if it proves a fault.

    Bytes and values were already found to be as saved. A further difference proves a fault if layout, code, data,
    software and deterministic kernels are equal, and the program is known to continue from a checkpoint with equal
    steps: it is the built-in workload, or promises equality and has shown it. A difference beyond the bounds also
    proves a fault where they were measured: for dense float32 models of the built-in workload that differ only in
    layout.
    """
    if now.differs:
        return f"{', '.join(sorted(now.differs))} differ from what the run was trained with"
    if now.exact:
        return "" if now.built_in or (now.promises_equality and now.has_agreed) else STATE_ELSEWHERE
    other = sorted(set(now.software) - _SUMS_ONLY)
    if other:
        return f"the checkpoint was made with other software: {', '.join(other)}"
    if not (now.built_in and now.dtype == "float32" and not now.experts):
        kind = "models with experts" if now.experts else "this model" if not now.built_in else now.dtype
        return f"no bound is known for {kind} where sums are added in another order"
    return ""
