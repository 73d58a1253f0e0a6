"""Read model for runs. Every screen, JSON answer and script uses the same view."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import NotFound, RunCancelled, RunFailed
from orchestrator.home import registry_path
from orchestrator.registry import fast_queries
from orchestrator.states import ENDED_RUNS, LIVE_RUNS, RunState
from trainer.protocol.time_spans import iso

KEYS = (
    "run", "state", "step", "total_steps", "loss", "attempts", "generations", "job_id", "cluster", "nodes",
    "last_checkpoint", "reason", "updated_at", "last_lines", "slurm_cluster", "restore_test",
    "tags", "eta_s", "expected_start", "after", "sweep",
)  # fmt: skip
"""Stable keys for a run in JSON output, in output order."""
_START_SECONDS = 600.0
"""Seconds after which a generation's startup (imports, compilation) is a small part of its time."""
_WITHOUT_LOG = frozenset({
    "submit_rejected", "submit_deferred", "submission_lost", "cancelled", "preempted", "time_limit", "job_lost",
})  # fmt: skip
"""Failure kinds without rank or agent logs. Only the reason for such a failure is known."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run as recorded in the registry at the time `now`. Times are seconds since the epoch."""

    now: float
    run: str
    state: str
    reason: str
    cluster: str  # scheduler kind
    scheduler: str  # scheduler instance; empty if unknown
    slurm_cluster: str | None
    run_dir: str
    config_digest: str
    step: int
    total_steps: int  # 0 if unknown
    loss: float | None
    tags: list[str]
    created_at: float
    updated_at: float
    not_before: float | None
    removal: Mapping[str, Any]
    after: str
    """Run that must succeed before this one starts."""
    after_removed: bool
    """Whether that run has been removed, even if another one has its name now."""
    sweep: Mapping[str, Any]
    """`orchestrator.registry.records.SweepMember` as JSON; empty: not part of a sweep."""
    notified: Mapping[str, Any]
    """`orchestrator.notifications.channels.NotificationState` as JSON."""
    attempts: int
    generations: int
    attempt: int | None
    """Number of the newest attempt; job, nodes and failure belong to this attempt."""
    job_id: str | None
    job_state: str | None
    nodes: list[str]
    start_at: float | None
    """Scheduler's last estimate of the waiting job's start, received at `start_noted_at`."""
    start_noted_at: float | None
    failure: Mapping[str, Any] | None
    checkpoint: Mapping[str, Any] | None
    """Newest usable checkpoint: step, trust, committed_at."""
    saved_path: str | None
    restore_test: Mapping[str, Any] | None
    """Newest finished restore test: step, layout, verdict, ended_at."""
    bad_test: Mapping[str, Any] | None
    """Restore test that found the newest tested checkpoint bad, with its reason, or None if the checkpoint is good."""
    test_of: Mapping[str, Any] | None
    """Run, step and layout that this run tests, if it is a restore test."""
    speed_since: Mapping[str, Any] | None
    """Start of the speed measurement: the newest generation's first save, or else its start (step, at, saved)."""

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_RUNS

    @property
    def is_over(self) -> bool:
        """Whether the run has ended or is held."""
        return self.state in ENDED_RUNS or self.state == RunState.HELD

    @property
    def age_s(self) -> float:
        """Seconds since the registry last recorded a change."""
        return max(0.0, self.now - self.updated_at)

    @property
    def last_checkpoint(self) -> dict[str, Any] | None:
        """Step, trust and age_s of the newest usable checkpoint."""
        last = self.checkpoint
        if last is None:
            return None
        age = round(max(0.0, self.now - last["committed_at"]), 3)
        return {"step": last["step"], "trust": last["trust"], "age_s": age}

    @property
    def last_lines(self) -> list[str]:
        """Last lines from the rank that failed first; only for a user's own program."""
        return list((self.failure or {}).get("lines", ()))

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the speed of the newest generation.

        None if the run is not training, has no known end, or may have spent most of its time starting.
        """
        since, left = self.speed_since, self.total_steps - self.step
        if self.state != RunState.RUNNING or since is None or left <= 0 or self.step <= since["step"]:
            return None
        took = self.updated_at - since["at"]
        if not since["saved"] and took < _START_SECONDS:
            return None
        ends = self.updated_at + left * took / (self.step - since["step"])
        return round(ends - self.now, 1) if took > 0 and ends > self.now else None

    @property
    def expected_start(self) -> dict[str, Any] | None:
        """Time, age and source of the scheduler's estimate of a waiting job's start, or None without a current one."""
        at, noted = self.start_at, self.start_noted_at
        if self.state != RunState.QUEUED or at is None or noted is None or at <= self.now:
            return None
        return {"at": iso(at), "age_s": round(max(0.0, self.now - noted), 1), "source": self.cluster}

    def to_json(self) -> dict[str, Any]:
        """Return the stable keys, in their documented order."""
        test = self.restore_test and summarize_test(self.restore_test)
        after = None if self.after_removed else self.after or None
        fields = {key: getattr(self, key) for key in KEYS} | {"after": after, "sweep": self.sweep or None}
        return {**fields, "updated_at": iso(self.updated_at), "restore_test": test}

    @property
    def look_closer(self) -> list[str]:
        """Commands that show why the run ended."""
        has_log = self.failure is not None and self.failure["kind"] not in _WITHOUT_LOG
        more = f"orch logs {self.run} --rank first-error" if has_log else f"orch events {self.run}"
        return [f"orch show {self.run}", more]

    @property
    def continue_command(self) -> str:
        """Command that continues the run or repeats a restore test, or "" if the run is live or there is none."""
        if self.is_live:
            return ""
        if self.test_of is not None:
            return repeat_test_command(self.test_of)
        if self.state != RunState.SUCCEEDED:
            return f"orch resume {self.run}"
        # A user's own program decides when it ends.
        return f"orch resume {self.run} train.steps={2 * self.total_steps}" if self.total_steps else ""

    @property
    def after_end(self) -> str:
        """Hint for a command that needs a live job when the run has none."""
        command = self.continue_command
        if self.state == RunState.SUCCEEDED and self.test_of is None:
            more = f"   train on:  {command}" if command else ""
            return f"it has finished:  orch show {self.run}{more}"
        return f"{'test again' if self.test_of else 'continue'}:  {command}"

    @property
    def end_error(self) -> RunFailed | RunCancelled | None:
        """Error for the final state, with the command to type, or None if the run succeeded."""
        if self.state == RunState.SUCCEEDED:
            return None
        if self.state == RunState.CANCELLED:
            return RunCancelled(self.sentence, where=self.run_dir, hint=self.after_end)
        see = f"see:  {'   '.join(self.look_closer)}"
        has_fix = f"orch resume {self.run} " in self.reason  # the reason names the change that the resume needs
        return RunFailed(self.sentence, where=self.run_dir, hint=see if has_fix else f"{see}   {self.after_end}")

    @property
    def sentence(self) -> str:
        """The run's state and its reason, as a sentence."""
        return f"{self.run} is {self.state}" + (f": {self.reason}" if self.reason else "")


def summarize_test(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return a view's restore test as plain JSON data."""
    return {**{key: test[key] for key in ("step", "layout", "verdict")}, "ended_at": iso(test["ended_at"])}


def repeat_test_command(order: Mapping[str, Any]) -> str:
    """Return the command that repeats a restore test; `order` is its entry in `Run.identity`."""
    return f"orch ckpt restore-test {order['run']}@{order['step']} --layout {order['layout']}"


def newest_runs(
    limit: int | None = 50,
    states: Iterable[str] | None = None,
    *,
    tests: bool = False,
    tags: Iterable[str] = (),
    sweep: str = "",
) -> list[RunView]:
    """Return the newest runs with all `tags`, or of one sweep; `tests` includes restore tests.

    Return no runs without a registry.
    """
    return _views(fast_queries.newest(registry_path(), limit, states, tests=tests, tags=tags, sweep=sweep))


def runs_by_name(names: Iterable[str]) -> list[RunView]:
    """Return the runs with exactly these names."""
    return _views(fast_queries.runs_by_name(registry_path(), names))


def find_run(name: str) -> RunView:
    """Return the run with this name or unique prefix, or the newest (`@last`). Raises NotFound with similar names."""
    path = registry_path()
    require_registry()
    found = newest_runs(1) if name == "@last" else runs_by_name([name])
    if not found:
        from orchestrator.registry.store import Store  # slower: needed for prefixes and for similar names

        with Store.open(path, readonly=True) as store:
            found = runs_by_name([store.run(name).name])
    return found[0]


def require_registry() -> None:
    """Raise NotFound if the registry does not exist yet."""
    if not (path := registry_path()).exists():
        hint = "`orch submit tiny-gpt` starts the first run; ORCH_REGISTRY names another registry"
        raise NotFound("there is no registry yet: nothing has been submitted from here", where=str(path), hint=hint)


def _views(rows: Iterable[dict[str, Any]]) -> list[RunView]:
    now = time.time()
    return [RunView(now=now, **row) for row in rows]
