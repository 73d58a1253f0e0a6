"""A program's side of all its adapters: progress, requests and a guard around every hook.

One adapter at a time answers requests: a Trainer saves through Accelerate and torch, whose adapters then only report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class ProgramRequests:
    """Stop requests of this process, shared by its adapters. It starts its thread when an adapter can answer."""

    def __init__(self, rank: Any, agree: Callable[[Any], Any]) -> None:
        """`agree` returns the process's `StopAgreement`, and starts its thread."""
        self.rank, self.owner, self.priority = rank, "", 1 << 30
        self.disabled: set[str] = set()
        self._agree = agree

    def agreement(self) -> Any:
        return self._agree(self.rank)

    def make_host(self, name: str, priority: int) -> AdapterHost:
        return AdapterHost(self, name, priority)


class AdapterHost:
    """Access of one adapter to its rank."""

    def __init__(self, requests: ProgramRequests, name: str, priority: int) -> None:
        self._requests, self._priority, self.name = requests, priority, name
        self.rank = requests.rank

    @property
    def leads(self) -> bool:
        """Return whether no adapter of a higher framework reports for this program."""
        return self._requests.priority >= self._priority and self.name not in self._requests.disabled

    def lead(self) -> None:
        """Report for this program from now on, unless an adapter of a higher framework does."""
        if self.leads:
            self._requests.owner, self._requests.priority = self.name, self._priority

    def answer_requests(self) -> None:
        """Declare that this adapter saves on request, so that the agent sends no SIGTERM."""
        if self.leads:
            self.lead()
            self._requests.agreement()
            self.rank.answer_requests()

    def due(self, step: int) -> int:
        """Return why all ranks save after this step (a `StopReason`), or 0. Not for adapters that cannot save."""
        if self._requests.owner != self.name or self.name in self._requests.disabled:
            return 0
        reason: int = self._requests.agreement().due(step)
        return reason

    def saved(self, step: int, path: str, *, late: bool = False, is_data: bool = False) -> None:
        """Report a checkpoint of this adapter's framework, whose rules apply to it. `late`: after further steps.

        `is_data` says that it seems to hold other data, and so does not show where checkpoints are.
        """
        self.rank.saved(step, path, self.name, late=late, is_data=is_data)

    def finish(self, step: int) -> None:
        """Report that the training has ended, after as many steps as its program wants (early stopping included)."""
        if step > 0:
            self.rank.step(number=step, total=step)
        self.rank.enter("done")

    def leave(self) -> None:
        """End this process after a save that the agent asked for. Raises SystemExit."""
        self._requests.agreement().leave()
        raise SystemExit(0)

    def guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook whose errors disable this adapter and never reach the program."""

        @functools.wraps(hook)
        def run_guarded(*args: Any, **kwargs: Any) -> Any:
            if self.name in self._requests.disabled:
                return None
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # outermost edge of code that runs inside the program
                self._requests.disabled.add(self.name)
                self.rank.report_error(f"adapter {self.name}: {type(error).__name__}: {error}")
                return None

        return run_guarded


@functools.cache
def start_requests(rank: Any, agree: Callable[[Any], Any]) -> ProgramRequests:
    """Return the requests of this process."""
    return ProgramRequests(rank, agree)
