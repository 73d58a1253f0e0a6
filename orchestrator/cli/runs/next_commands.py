"""What a person can type next about a run in its state: only commands that the state allows."""

from collections.abc import Mapping
from typing import Any

from orchestrator.states import LIVE_RUNS, RunState

Row = Mapping[str, Any]
"""A run as `orch status` reads it."""

_WITHOUT_LOG = frozenset({
    "submit_rejected", "submit_deferred", "submission_lost", "cancelled", "preempted", "time_limit", "job_lost",
})  # fmt: skip
"""Failures that no rank and no agent wrote about: their reason says all that is known."""


def has_first_error(failure: Mapping[str, Any] | None) -> bool:
    """Whether `orch logs RUN --rank first-error` tells more of a run whose newest attempt failed so."""
    return failure is not None and failure["kind"] not in _WITHOUT_LOG


def look_closer(row: Row) -> list[str]:
    """Commands that say why a run ended as it did."""
    run = row["run"]
    more = f"orch logs {run} --rank first-error" if has_first_error(row["failure"]) else f"orch events {run}"
    return [f"orch show {run}", more]


def go_on(row: Row) -> str:
    """The command that continues a run, or repeats a restore test; empty where nothing does, or it goes on already."""
    run, test = row["run"], row["test_of"]
    if row["state"] in LIVE_RUNS:
        return ""
    if test is not None:
        return restore_test_again(test)
    if row["state"] == RunState.SUCCEEDED:
        # The end of a user's own program is its own.
        return f"orch resume {run} train.steps={2 * row['total_steps']}" if row["total_steps"] else ""
    return f"orch resume {run}"


def restore_test_again(order: Mapping[str, Any]) -> str:
    """The command for another test like the one of this order, which `Run.identity` has."""
    return f"orch ckpt restore-test {order['run']}@{order['step']} --layout {order['layout']}"


def after_end(row: Row) -> str:
    """A hint for what needs a job, of a run that has none any more."""
    command = go_on(row)
    if row["state"] == RunState.SUCCEEDED and row["test_of"] is None:
        more = f"   train on:  {command}" if command else ""
        return f"it has finished:  orch show {row['run']}{more}"
    return f"{'test again' if row['test_of'] else 'go on with it'}:  {command}"
