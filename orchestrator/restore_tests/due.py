"""Next restore test of a run: due time, reason, and obstacles. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random

from orchestrator.config.restore_tests_config import NIGHTLY, OFF, RestoreTestsConfig, interval_seconds, rank_count
from orchestrator.config.run_config import RunConfig
from orchestrator.registry.records import Attempt, Checkpoint, RestoreTest, Run
from orchestrator.states import LIVE_RUNS, RunState, Trust
from trainer.protocol.config_sections.watch_config import OFF as WATCH_OFF
from trainer.protocol.restore_test import FOUND_BAD, UNDECIDED, Outcome

NIGHT = "0 3 * * *"
ASSUMED_SECONDS = 180.0
"""Assumed duration of a test in seconds, until one of the run's tests has completed."""
AGAIN_AFTER = 900.0
"""Seconds before an unfinished test is due again; doubled after each consecutive unfinished test."""
MOST_PAUSE = 86400.0
_BAD = frozenset({Trust.WRITING, Trust.SUSPECT, Trust.CORRUPT, Trust.DELETED})


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about one run for its restore test schedule.

    `spent`: rank-seconds that its tests have used so far, except tests that a user requested.
    """

    run: Run
    config: RunConfig
    attempts: tuple[Attempt, ...]
    checkpoints: tuple[Checkpoint, ...]  # testable ones, newest first
    tests: tuple[RestoreTest, ...]  # of this run, oldest first
    spent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Due:
    """Test that is due at `at` (seconds since the epoch). `refused`: why it does not start; empty if it does."""

    run: str
    checkpoint: str
    step: int
    layout: str
    why: str
    at: float
    refused: str = ""


def next_test(facts: RunFacts, now: float, rng: Random) -> Due | None:
    """Return the next restore test of a run, or None. A run has at most one test in progress."""
    settings = facts.config.restore_tests
    if settings.every == OFF or not facts.checkpoints or any(test.ended_at is None for test in facts.tests):
        return None
    older = _after_bad_verdict(facts)
    found = older or _after_success(facts, now) or _other_layouts(facts) or _due_by_schedule(facts, now, rng)
    if found is None:
        return None
    found = _back_off(facts, found)
    if _needs_program(facts.config):
        why = "the steps of this program are unknown (watch.instrument=off), so it needs restore_tests.command"
        return replace(found, refused=why)
    if older is not None or found.at > now:
        return found  # the search for a good older checkpoint ignores the budget
    return replace(found, refused=_over_budget(facts, found, now))


def _needs_program(config: RunConfig) -> bool:
    """Return whether a test needs a restore program that is not configured."""
    return _uses_own_command(config) and config.watch.instrument == WATCH_OFF


def _uses_own_command(config: RunConfig) -> bool:
    """Return whether tests start the run's own command, since no restore program is configured."""
    return bool(config.command) and not config.restore_tests.command


def trained_seconds(attempts: Iterable[Attempt], now: float) -> float:
    """Return the total run time of the attempts in seconds."""
    return sum(
        max(0.0, (now if attempt.ended_at is None else attempt.ended_at) - attempt.started_at)
        for attempt in attempts
        if attempt.started_at is not None
    )


def _proven(facts: RunFacts) -> set[tuple[str, str]]:
    return {(test.checkpoint, test.layout) for test in facts.tests if test.verdict == Outcome.RESTORED}


def _found_bad(facts: RunFacts) -> set[str]:
    """Return the checkpoints whose newest verdict is bad. Only a user can request another test of them."""
    newest = {test.checkpoint: test.verdict for test in facts.tests if test.verdict not in UNDECIDED}
    return {name for name, verdict in newest.items() if verdict in FOUND_BAD}


def _lacking(facts: RunFacts, checkpoint: Checkpoint, known: Collection[tuple[str, str]]) -> str:
    """Return the first layout without an entry for the checkpoint in `known`, or an empty string."""
    layouts = facts.config.restore_tests.layouts
    return next((layout for layout in layouts if (checkpoint.name, layout) not in known), "")


def _unproven(facts: RunFacts, checkpoint: Checkpoint) -> str:
    """Return the first layout on which the checkpoint has not been restored yet, or an empty string."""
    return _lacking(facts, checkpoint, _proven(facts))


def _due(facts: RunFacts, checkpoint: Checkpoint, layout: str, why: str, at: float) -> Due:
    return Due(run=facts.run.name, checkpoint=checkpoint.name, step=checkpoint.step, layout=layout, why=why, at=at)


def _last_finished(facts: RunFacts) -> RestoreTest | None:
    finished = [test for test in facts.tests if test.verdict != Outcome.NOT_FINISHED]
    return finished[-1] if finished else None


def _after_bad_verdict(facts: RunFacts) -> Due | None:
    """Return a test of the next older checkpoint, due immediately, to find a good one."""
    last = _last_finished(facts)
    if last is None or last.verdict not in FOUND_BAD or last.ended_at is None:
        return None
    for checkpoint in facts.checkpoints:
        if checkpoint.step < last.step and checkpoint.trust not in _BAD and checkpoint.name not in _found_bad(facts):
            if not any(name == checkpoint.name for name, _ in _proven(facts)):
                layout = last.layout if last.layout in facts.config.restore_tests.layouts else ""
                layout = layout or facts.config.restore_tests.layouts[0]
                return _due(facts, checkpoint, layout, f"step {last.step} was found {last.verdict}", last.ended_at)
            return None  # an older checkpoint is known to be good
    return None


def _after_success(facts: RunFacts, now: float) -> Due | None:
    """Return the single test of a successful run's last checkpoint, from which its own command has no step to train."""
    newest = facts.checkpoints[0]
    if _uses_own_command(facts.config):
        return None
    if facts.run.state is not RunState.SUCCEEDED or newest.trust in _BAD or newest.name in _found_bad(facts):
        return None
    # Changed code or data stays changed, so a finished run is not tested again because of it.
    tried = {(test.checkpoint, test.layout) for test in facts.tests if test.verdict != Outcome.NOT_FINISHED}
    layout = _lacking(facts, newest, tried)
    return _due(facts, newest, layout, "the run has succeeded", facts.run.updated_at) if layout else None


def _other_layouts(facts: RunFacts) -> Due | None:
    """Return a test on the next layout, for a checkpoint that was restored on another layout."""
    last = _last_finished(facts)
    if last is None or last.verdict != Outcome.RESTORED or last.ended_at is None or last.forced:
        return None
    same = [checkpoint for checkpoint in facts.checkpoints if checkpoint.name == last.checkpoint]
    layout = _unproven(facts, same[0]) if same else ""
    return _due(facts, same[0], layout, f"restored on {last.layout}, next layout", last.ended_at) if layout else None


def _due_by_schedule(facts: RunFacts, now: float, rng: Random) -> Due | None:
    if facts.run.state not in LIVE_RUNS:
        return None
    at, chosen = _when(facts, now), _sample_checkpoint(facts, rng)
    if at is None or chosen is None:
        return None
    every = facts.config.restore_tests.every
    return _due(facts, chosen, _unproven(facts, chosen) or facts.config.restore_tests.layouts[0], f"every {every}", at)


def _when(facts: RunFacts, now: float) -> float | None:
    last = _last_finished(facts)
    every = facts.config.restore_tests.every
    seconds = interval_seconds(every)
    if seconds is not None:
        trained = trained_seconds(facts.attempts, now)
        return now + max(0.0, seconds - trained) if last is None else last.begun_at + seconds
    return cron_time(NIGHT if every == NIGHTLY else every, facts.run.created_at if last is None else last.begun_at)


def cron_time(expression: str, after: float) -> float | None:
    """Return the first time after `after` that matches a crontab line, in local time; None if there is none."""
    from cronsim import CronSim  # only for runs with such a schedule

    found = next(CronSim(expression, datetime.fromtimestamp(after)), None)
    return None if found is None else found.timestamp()


def _sample_checkpoint(facts: RunFacts, rng: Random) -> Checkpoint | None:
    bad = _found_bad(facts)
    good = [item for item in facts.checkpoints if item.trust not in _BAD and item.name not in bad]
    sample = facts.config.restore_tests.sample
    if not good:
        return None
    if sample == "random":
        return rng.choice(good)
    if sample == "unproven":
        return next((checkpoint for checkpoint in good if _unproven(facts, checkpoint)), None)
    return good[0] if sample == "newest" else good[-1]


def _back_off(facts: RunFacts, due: Due) -> Due:
    """Postpone a test after unfinished tests, for longer after each consecutive one."""
    in_a_row = 0
    for test in reversed(facts.tests):
        if test.verdict != Outcome.NOT_FINISHED:
            break
        in_a_row += 1
    if not in_a_row:
        return due
    last = facts.tests[-1]
    pause = min(MOST_PAUSE, AGAIN_AFTER * 2 ** min(in_a_row - 1, 10))
    why = f"{due.why}; the last {in_a_row} did not finish" if in_a_row > 1 else f"{due.why}; the last did not finish"
    return replace(due, at=max(due.at, (last.ended_at or last.begun_at) + pause), why=why)


def _over_budget(facts: RunFacts, due: Due, now: float) -> str:
    config: RestoreTestsConfig = facts.config.restore_tests
    ranks = rank_count(due.layout, facts.config)
    used = trained_seconds(facts.attempts, now) * facts.config.cluster.world_size
    seen = [test for test in facts.tests if test.verdict and test.layout == due.layout and "seconds" in test.evidence]
    cost = ranks * (float(seen[-1].evidence["seconds"]) if seen else ASSUMED_SECONDS)
    allowed = config.budget * used
    if facts.spent + cost <= allowed:
        return ""
    return (
        f"over the budget: {config.budget:.2%} of {used / 3600:.2f} rank-hours is {allowed:.0f} rank-seconds; "
        f"{facts.spent:.0f} are spent, and the test needs about {cost:.0f}"
    )
