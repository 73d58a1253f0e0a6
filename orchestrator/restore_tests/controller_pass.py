"""Restore tests after each pass of a controller: record verdicts and start due tests."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from orchestrator.config.restore_tests_config import OFF, rank_count
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import Fenced, OrchError, RegistryError
from orchestrator.registry.records import Checkpoint, RestoreTest, Run
from orchestrator.registry.store import Store
from orchestrator.restore_tests.create import RestoreTestRequest, check_test, create_test, hold, shared_paths
from orchestrator.restore_tests.due import Due, RunFacts, next_test, trained_seconds
from orchestrator.restore_tests.record_verdicts import HOUR, VerdictRecorder
from orchestrator.run_dirs.bounded_files import Files, RunDirHangs
from orchestrator.run_dirs.controlled_run import RunConfigs
from orchestrator.states import LIVE_RUNS, Trust

log = logging.getLogger("orch.controller")

LOOK_EVERY = 30.0
"""Seconds between checks for due tests."""
RECENT = 7 * 86400.0
"""Seconds for which a run is still tested after its end. Later tests need a user's request."""
_UNUSABLE = (OrchError, OSError, ValueError, TypeError, KeyError, ImportError)
"""Errors from one run's configuration or folder; they must not affect other runs."""


@dataclass
class RestoreTests:
    """Restore tests of one controller's runs, without state that a successor would need."""

    store: Store
    files: Files
    owns: Callable[[Run], bool]
    between: Callable[[], None] = lambda: None
    """Called between runs to renew the lease; there may be thousands of runs."""
    rng: Random = field(default_factory=Random)
    _looked_at: float = -LOOK_EVERY
    _settled: dict[str, float] = field(default_factory=dict)  # ended runs without a due test in their current state

    def __post_init__(self) -> None:
        self.configs = RunConfigs(self.store)

    def run(self, epoch: int, now: float, *, look: bool = False, force: bool = False) -> list[str]:
        """Close finished tests and start due ones; return one line each. `look`: ignore LOOK_EVERY.

        `force`: ignore budgets and schedules for runs with a testable checkpoint. Raises Fenced, RegistryError.
        """
        recorder = VerdictRecorder(self.store, self.files, self.owns)
        under_way = self.store.restore_tests(going_on=True)
        done = [words for test in under_way if (words := recorder.close_test(test, epoch, now))]
        if look or done or time.monotonic() - self._looked_at >= LOOK_EVERY:
            self._looked_at = time.monotonic()
            recorder.unpin_ended(now - HOUR)
            done += self._begin(now, force=force)
        return done

    def _begin(self, now: float, *, force: bool) -> list[str]:
        done = []
        for due in self.due(now, force=force):
            if due.at > now or due.refused:
                continue
            try:
                run = self.store.run(due.run)
                test = begin_test(self.store, self.files, run, self._request(due, forced=force), now)
            except (Fenced, RegistryError):
                raise
            except _UNUSABLE as error:
                log.warning("%s: cannot test the restore of step %d on %s: %s", due.run, due.step, due.layout, error)
                continue
            done.append(f"{test.test}: restore test of step {due.step} of {due.run} on {due.layout}: {due.why}")
        return done

    def _request(self, due: Due, *, forced: bool = False) -> RestoreTestRequest:
        checkpoint = self.store.checkpoint(due.run, due.checkpoint)
        return RestoreTestRequest(checkpoint=checkpoint, layout=due.layout, forced=forced)

    def due(self, now: float, *, force: bool = False) -> list[Due]:
        """Return the next test of every run, earliest first. Tests in excess of `max_parallel` are refused."""
        found: list[Due] = []
        most = 1
        for run in self._candidates(now, force):
            self.between()
            try:
                facts = self._facts(run, now)
                due = next_test(facts, now, self.rng) if facts is not None else None
            except _UNUSABLE as error:
                log.warning("%s: cannot determine when its next restore test is due: %s", run.name, error)
                continue
            if facts is not None and due is not None:
                most = max(most, facts.config.restore_tests.max_parallel)
                found.append(
                    replace(due, why=f"requested; {due.why}", at=min(due.at, now), refused="") if force else due
                )
            if run.state not in LIVE_RUNS and (due is None or due.refused) and not force:
                self._settled[run.name] = run.updated_at
        found.sort(key=lambda due: (due.at, due.run))
        return self._within_limits(found, most, now)

    def _within_limits(self, found: list[Due], most: int, now: float) -> list[Due]:
        """Refuse tests in excess of the runs' highest `max_parallel`. A test that cannot start takes no slot."""
        under_way = len(self.store.restore_tests(going_on=True))
        room, limited = most - under_way, []
        waits = f"{under_way} in progress; the limit is {most} (restore_tests.max_parallel)"
        for due in found:
            if due.at > now or due.refused:
                limited.append(due)
            elif room <= 0:
                limited.append(replace(due, refused=waits))
            elif cannot := self._cannot(due):
                limited.append(replace(due, refused=cannot))
            else:
                room -= 1
                limited.append(due)
        return limited

    def _cannot(self, due: Due) -> str:
        try:
            check_test(self.store, self.store.run(due.run), self._request(due))
        except OrchError as error:
            return "; ".join(part for part in (error.what, error.hint) if part)
        except _UNUSABLE as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _candidates(self, now: float, force: bool) -> list[Run]:
        return [
            run
            for run in self.store.runs()
            if self.owns(run)
            and not run.removal
            and "restore_test" not in run.identity
            and (run.state in LIVE_RUNS or now - run.updated_at <= RECENT)
            and (force or not self._is_settled(run))
        ]

    def _is_settled(self, run: Run) -> bool:
        """Return whether an ended run had no due test, and neither the run nor its tests have changed since."""
        return self._settled.get(run.name) == run.updated_at and not self.store.restore_tests(run.name)

    def _facts(self, run: Run, now: float) -> RunFacts | None:
        config = self.configs(run.config_digest)
        if config.restore_tests.every == OFF:
            return None
        tests = tuple(self.store.restore_tests(run.name))
        return RunFacts(
            run=run,
            config=config,
            attempts=tuple(self.store.attempts(run.name)),
            checkpoints=tuple(self._reachable(run, config)),
            tests=tests,
            spent=sum(
                rank_count(test.layout, config) * trained_seconds(self.store.attempts(test.test), now)
                for test in tests
                if not test.forced
            ),
        )

    def _reachable(self, run: Run, config: RunConfig) -> list[Checkpoint]:
        """Return the checkpoints that have a copy every node can read. `choose_copy` selects the copy."""
        rows = [row for row in self.store.checkpoints(run.name) if row.trust is not Trust.DELETED]
        if config.command or not (rows and config.checkpoint.tiers):
            return rows
        shared = set(shared_paths(run, config))
        copied = {copy.name for copy in self.store.copies(run.name) if copy.tier in shared}
        return [row for row in rows if row.name in copied or (row.tier or shared_paths(run, None)[0]) in shared]


def begin_test(store: Store, files: Files, run: Run, request: RestoreTestRequest, now: float) -> RestoreTest:
    """Create a test and pin its checkpoint. Raises the errors of `create_test`.

    If the checkpoint is deleted in between, the test ends without a verdict and the next one becomes due.
    """
    test = create_test(store, run, request, now)
    try:
        files.call(Path(run.run_dir), lambda: hold(run, test))
    except (OSError, RunDirHangs) as error:
        log.warning("%s: %s cannot be pinned for its restore test: %s", run.name, test.checkpoint, error)
    return test
