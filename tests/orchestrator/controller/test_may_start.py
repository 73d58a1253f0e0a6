"""Which runs wait for another one or for their turn in a sweep, and with what reason."""

from dataclasses import replace

import pytest

from orchestrator.controller.expected_start import RECORD_EVERY, changed_estimate
from orchestrator.controller.may_start import waiting_runs
from orchestrator.registry.records import Attempt, Run
from orchestrator.scheduler.interface import JobStatus
from orchestrator.states import AttemptState, RunState


def run(name: str, state: RunState = RunState.CREATED, *, after: str = "", sweep: str = "", limit: int = 2) -> Run:
    member = {"name": sweep, "limit": limit, "point": {"a": name}, "base": ""} if sweep else {}
    return Run(
        name=name, state=state, reason="", cluster="slurm", run_dir="", config_digest="", total_steps=1,
        predecessor=after, sweep=member,
    )  # fmt: skip


def attempts(*runs: Run, submitted: tuple[str, ...] = ()) -> dict[str, tuple[Attempt, ...]]:
    return {
        one.name: (
            Attempt(
                run=one.name, number=1, state=AttemptState.INTENT, nonce="0", job_name="j",
                submitted_at=1.0 if one.name in submitted else None,
            ),
        )
        for one in runs
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "hold", "words"),
    [
        (RunState.RUNNING, False, "waits until first-1 has succeeded, which is RUNNING"),
        (RunState.HELD, False, "which is HELD"),
        (RunState.FAILED, True, "was to start after first-1, which is FAILED; resuming this run starts it without"),
        (RunState.CANCELLED, True, "`orch resume first-1` first lets this run wait for it again"),
    ],
)
def test_a_run_waits_for_its_predecessor(state: RunState, hold: bool, words: str) -> None:
    first, second = run("first-1", state), run("second-1", after="first-1")
    wait = waiting_runs([second], attempts(second), {"second-1": first})["second-1"]
    assert wait.hold is hold
    assert words in wait.reason


def test_a_run_starts_after_success_and_is_held_if_the_other_is_removed() -> None:
    second = run("second-1", after="first-1")
    assert waiting_runs([second], attempts(second), {"second-1": run("first-1", RunState.SUCCEEDED)}) == {}
    assert waiting_runs([second], attempts(second), {})["second-1"].hold
    failed = {"second-1": run("first-1", RunState.FAILED)}
    assert waiting_runs([second], attempts(second, submitted=("second-1",)), failed) == {}, "it has begun already"


def test_the_oldest_runs_of_a_sweep_start_first_and_at_most_so_many() -> None:
    newest_first = [run(f"s-{number}", sweep="s") for number in (4, 3, 2, 1)]
    waits = waiting_runs(newest_first, attempts(*newest_first), {})
    assert set(waits) == {"s-3", "s-4"}
    assert waits["s-3"].reason == "waits for its turn in the sweep s: 2 of its runs are unfinished, at most 2 at once"
    begun = [replace(newest_first[3], state=RunState.RECOVERING), *newest_first[:3]]
    waits = waiting_runs([*begun[1:], begun[0]], attempts(*begun, submitted=("s-1",)), {})
    assert set(waits) == {"s-3", "s-4"}, "a run that waits for its next attempt is unfinished"


def test_other_sweeps_resumed_and_cancelled_runs_do_not_count() -> None:
    one, other = run("s-1", sweep="s", limit=1), run("t-1", sweep="t", limit=1)
    assert waiting_runs([other, one], attempts(one, other), {}) == {}
    resumed = run("s-2", RunState.RECOVERING, sweep="s", limit=1)
    assert set(waiting_runs([resumed, one], attempts(one, resumed), {})) == {"s-1"}
    cancelled = run("s-3", sweep="s", limit=1)
    newer = run("s-4", sweep="s", limit=1)
    assert "s-3" not in waiting_runs([newer, cancelled], attempts(newer, cancelled), {}, {"s-3"})


def test_a_run_that_another_controller_serves_counts_as_unfinished() -> None:
    here, elsewhere = run("s-2", sweep="s", limit=1), run("s-1", sweep="s", limit=1)
    assert set(waiting_runs([here, elsewhere], attempts(here), {})) == {"s-2"}


NOW = 1000.0


def estimate(known: float | None, at: float | None, start: float | None, **job: object) -> dict[str, object]:
    attempt = replace(attempts(run("a-1"))["a-1"][0], expected_start=known, expected_at=at)
    fields: dict[str, object] = {"job_id": "1", "name": "j", "state": "PENDING", "start_time": start, **job}
    return changed_estimate(attempt, JobStatus(**fields), NOW)  # type: ignore[arg-type]


def test_an_estimate_is_recorded_when_it_moves_or_gets_old() -> None:
    assert estimate(None, None, 2000.0) == {"expected_start": 2000.0, "expected_at": NOW}
    assert estimate(2000.0, 990.0, 2030.0) == {}
    assert estimate(2000.0, 990.0, 2100.0) == {"expected_start": 2100.0, "expected_at": NOW}
    assert estimate(2000.0, NOW - RECORD_EVERY, 2000.0) == {"expected_start": 2000.0, "expected_at": NOW}


def test_a_job_that_is_held_or_due_or_not_planned_has_no_estimate() -> None:
    none = {"expected_start": None, "expected_at": None}
    assert estimate(2000.0, 990.0, 2000.0, held=True) == none
    assert estimate(2000.0, 990.0, 990.0) == none
    assert estimate(2000.0, 990.0, None) == none
    assert estimate(None, None, 2000.0, state="RUNNING") == {}
