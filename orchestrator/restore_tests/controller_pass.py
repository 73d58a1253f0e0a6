"""What a controller does about restore tests after each pass over the runs: record verdicts, begin what is due."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from orchestrator.config.restore_tests_config import OFF
from orchestrator.config.run_config import RunConfig
from orchestrator.controller.run_dirs.bounded_files import Files, RunDirHangs
from orchestrator.errors import Fenced, NotFound, OrchError, RegistryError
from orchestrator.registry.records import Checkpoint, Notice, RestoreTest, Run
from orchestrator.registry.store import Store
from orchestrator.restore_tests.create import Asked, create_test, place_of
from orchestrator.restore_tests.due import Due, RunFacts, next_test, trained_seconds, under_the_limit
from orchestrator.restore_tests.layouts import rank_count
from orchestrator.restore_tests.marks import hold, release, write_verdict
from orchestrator.states import LIVE_RUNS, RunState, Trust, may_move
from trainer.contract.config import build
from trainer.contract.events import EventKind
from trainer.contract.restore_test import Outcome
from trainer.contract.run_dir import RunDir

log = logging.getLogger("orch.controller")

LOOK_EVERY = 30.0
"""Seconds between two looks for tests that are due."""
RECENT = 7 * 86400.0
"""How long a run that has succeeded is looked at; a test that was not due by then is a person's matter."""
_TRUST = {Outcome.RESTORED: Trust.RESTORED, Outcome.SUSPECT: Trust.SUSPECT, Outcome.CORRUPT: Trust.CORRUPT}


@dataclass
class RestoreTests:
    """The restore tests of one controller's runs; keeps nothing that a successor would miss."""

    store: Store
    files: Files
    owns: Callable[[Run], bool]
    rng: Random = field(default_factory=Random)
    _looked_at: float = -LOOK_EVERY
    _configs: dict[str, RunConfig] = field(default_factory=dict)

    def run(self, epoch: int, now: float, *, look: bool = False, force: bool = False) -> list[str]:
        """End and begin what is due; says what it did. `look`: not only every LOOK_EVERY seconds.

        `force`: budgets and schedules hold back nothing that has a checkpoint to test. Raises Fenced, RegistryError.
        """
        done = [words for test in self.store.restore_tests(going_on=True) if (words := self._ended(test, epoch, now))]
        if look or done or time.monotonic() - self._looked_at >= LOOK_EVERY:
            self._looked_at = time.monotonic()
            done += self._begin(now, force=force)
        return done

    # -- ends

    def _ended(self, test: RestoreTest, epoch: int, now: float) -> str:
        """Close a test whose run has ended; empty while it goes on."""
        run = self.store.run(test.test)
        if not self.owns(run) or run.state in LIVE_RUNS:
            return ""
        told = [notice for notice in self.store.notices(test.test) if notice.kind == EventKind.RESTORE_TESTED]
        outcome, reason, evidence = Outcome.NOT_FINISHED, run.reason, dict[str, Any]()
        if told:
            # Ranks of a user's own program speak each for themselves: one that failed decides.
            said = max((notice.data for notice in told), key=lambda data: data["verdict"] != Outcome.RESTORED)
            outcome, reason, evidence = Outcome(said["verdict"]), str(said["reason"]), dict(said["evidence"])
        evidence |= self._times(test, evidence, now)
        source = self._source(test)
        if source is not None:
            self._mark(source, test, str(evidence.get("place", "")), outcome, reason, now)

        def closed() -> None:
            self.store.end_restore_test(test.test, outcome, reason, evidence, epoch=epoch, now=now)
            if source is not None:
                self._judge(source, test, evidence, outcome, reason, epoch, now)

        self.store.together(closed)
        return f"{test.test}: step {test.step} of {test.run} on {test.layout}: {outcome}, {reason}"

    def _source(self, test: RestoreTest) -> Run | None:
        """The run whose checkpoint it is, if this controller may write about it."""
        try:
            run = self.store.run(test.run)
        except NotFound:
            return None
        return run if run.name == test.run and self.owns(run) else None

    def _times(self, test: RestoreTest, evidence: dict[str, Any], now: float) -> dict[str, float]:
        """Seconds of the job, and from its start to the first step without what a restart would not do."""
        attempts = self.store.attempts(test.test)
        found = {"seconds": trained_seconds(attempts, now)}
        first, began = evidence.get("first_step_at"), attempts[-1].started_at
        if isinstance(first, float) and began is not None:
            verified = evidence.get("verify_seconds")
            found["rto_seconds"] = max(0.0, first - began - (verified if isinstance(verified, float) else 0.0))
        return found

    def _mark(self, source: Run, test: RestoreTest, place: str, outcome: Outcome, reason: str, now: float) -> None:
        others = [one for one in self.store.restore_tests(source.name, going_on=True) if one.test != test.test]
        beside = any(one.checkpoint == test.checkpoint for one in others)

        def marked() -> None:
            if place:
                write_verdict(source, test, place, outcome, reason, now)
            if not beside:
                release(source, test)

        try:
            self.files.call(Path(source.run_dir), marked)
        except (OSError, RunDirHangs) as error:
            log.warning(
                "%s: the verdict of %s cannot be written beside its checkpoints: %s", source.name, test.test, error
            )

    def _judge(
        self, source: Run, test: RestoreTest, evidence: dict[str, Any], outcome: Outcome, reason: str, epoch: int,
        now: float,
    ) -> None:  # fmt: skip
        """What the verdict means for the checkpoint, and a notice for people when it is a bad one."""
        known = [row for row in self.store.checkpoints(source.name) if row.name == test.checkpoint]
        if outcome is Outcome.NOT_FINISHED or not known:
            return
        home = known[0].tier or str(RunDir(Path(source.run_dir)).checkpoints)
        why = f"restore test {test.test} on {test.layout}: {reason}"
        trust = _TRUST[outcome]
        if evidence.get("place") == home:
            if known[0].trust is not trust and may_move(known[0].trust, trust):
                self.store.trust(source.name, test.checkpoint, trust, why, epoch=epoch, now=now)
        elif outcome is Outcome.CORRUPT:
            self.store.drop_copy(source.name, test.checkpoint, str(evidence.get("place")), epoch=epoch)
        if outcome is not Outcome.RESTORED:
            attempt = self.store.attempts(source.name)[-1].number
            data = {"verdict": str(outcome), "step": test.step, "checkpoint": test.checkpoint, "reason": reason}
            notice = Notice(
                run=source.name, attempt=attempt, source=f"restore-test/{test.test}", seq=1,
                kind=str(EventKind.RESTORE_TESTED), generation=0, time=now, data={**data, "test": test.test},
            )  # fmt: skip
            self.store.put_notice(notice, epoch=epoch)

    # -- beginnings

    def _begin(self, now: float, *, force: bool) -> list[str]:
        done = []
        for due in self.due(now, force=force):
            if due.at > now or due.refused:
                continue
            run = self.store.run(due.run)
            row = next(row for row in self.store.checkpoints(due.run) if row.name == due.checkpoint)
            try:
                test = begin_test(
                    self.store, self.files, run, Asked(checkpoint=row, layout=due.layout, forced=force), now
                )
            except (Fenced, RegistryError):
                raise
            except (OrchError, OSError, ValueError) as error:
                log.warning("%s: no restore test of step %d on %s: %s", due.run, due.step, due.layout, error)
                continue
            done.append(f"{test.test}: restore test of step {due.step} of {due.run} on {due.layout}: {due.why}")
        return done

    def due(self, now: float, *, force: bool = False) -> list[Due]:
        """The next test of every run, the one that is due first in front; those beyond `max_parallel` are refused."""
        found: list[Due] = []
        limits: dict[str, int] = {}
        for run in self._candidates(now):
            facts = self._facts(run, now)
            due = next_test(facts, now, self.rng) if facts is not None else None
            if facts is None or due is None:
                continue
            limits[run.name] = facts.config.restore_tests.max_parallel
            found.append(_forced(due, now) if force else due)
        found.sort(key=lambda one: (one.at, one.run))
        return _within_limits(found, limits, len(self.store.restore_tests(going_on=True)), now)

    def _candidates(self, now: float) -> list[Run]:
        runs = self.store.runs({*LIVE_RUNS, RunState.SUCCEEDED, RunState.HELD, RunState.FAILED, RunState.CANCELLED})
        return [
            run
            for run in runs
            if self.owns(run)
            and "restore_test" not in run.identity
            and (run.state in LIVE_RUNS or now - run.updated_at <= RECENT)
        ]

    def _config(self, run: Run) -> RunConfig:
        if run.config_digest not in self._configs:
            config = build(RunConfig, self.store.config(run.config_digest))
            assert isinstance(config, RunConfig)
            self._configs[run.config_digest] = config
        return self._configs[run.config_digest]

    def _facts(self, run: Run, now: float) -> RunFacts | None:
        config = self._config(run)
        if config.restore_tests.every == OFF:
            return None
        tests = tuple(self.store.restore_tests(run.name))
        spent = sum(_rank_seconds(self.store, config, test, now) for test in tests if not test.forced)
        return RunFacts(
            run=run,
            config=config,
            attempts=tuple(self.store.attempts(run.name)),
            checkpoints=tuple(self._reachable(run, config)),
            tests=tests,
            spent=spent,
        )

    def _reachable(self, run: Run, config: RunConfig) -> Sequence[Checkpoint]:
        found = []
        for row in self.store.checkpoints(run.name):
            if row.trust is Trust.DELETED:
                continue
            try:
                place_of(self.store, run, config, row, config.restore_tests.tier)
            except OrchError:
                continue
            found.append(row)
        return found


def begin_test(store: Store, files: Files, run: Run, asked: Asked, now: float) -> RestoreTest:
    """Create a test and pin its checkpoint; raises what `create_test` raises, and OSError.

    Pinned before the run is written: what is deleted in between is not tested, and a pin that is left is taken away
    by the next test of the checkpoint.
    """
    test = create_test(store, run, asked, now)
    try:
        files.call(Path(run.run_dir), lambda: hold(run, test))
    except (OSError, RunDirHangs) as error:
        log.warning("%s: %s cannot be pinned for its restore test: %s", run.name, test.checkpoint, error)
    return test


def _rank_seconds(store: Store, config: RunConfig, test: RestoreTest, now: float) -> float:
    return rank_count(test.layout, config) * trained_seconds(store.attempts(test.test), now)


def _forced(due: Due, now: float) -> Due:
    return replace(due, why=f"asked for; {due.why}", at=min(due.at, now), refused="")


def _within_limits(found: list[Due], limits: dict[str, int], going_on: int, now: float) -> list[Due]:
    """At most as many together as the most generous of the runs allows; the others wait."""
    most = max(limits.values(), default=1)
    ready = under_the_limit([one for one in found if one.at <= now], going_on, most)
    waits = f"{going_on} under way, {most} may be (restore_tests.max_parallel)"
    return [
        one
        if one in ready or one.at > now or one.refused
        else _refused(one, waits if going_on else f"{most} at a time")
        for one in found
    ]


def _refused(due: Due, why: str) -> Due:
    return replace(due, refused=why)
