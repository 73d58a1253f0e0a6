"""Record a restore test's result after its run has ended: trust, mark next to the checkpoint, notice to users."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, NotFound
from orchestrator.registry.records import Attempt, Notice, RestoreTest, Run
from orchestrator.registry.store import Store
from orchestrator.restore_tests.create import release, write_verdict
from orchestrator.restore_tests.due import trained_seconds
from orchestrator.run_dirs.bounded_files import Files, RunDirHangs
from orchestrator.scheduler.slurm.sbatch_values import minutes
from orchestrator.states import LIVE_RUNS, RunState, Trust, may_move
from trainer.protocol.events import EventKind
from trainer.protocol.plain_data import build
from trainer.protocol.restore_test import FOUND_BAD, UNDECIDED, Outcome, RestoreVerdict
from trainer.protocol.run_dir import RunDir

log = logging.getLogger("orch.controller")

HOUR = 3600.0
START_WITHIN, QUEUE_AT_MOST = HOUR, 24 * HOUR
"""Seconds after which a test is abandoned if it cannot be submitted, or if its job never starts."""
_TRUST = {Outcome.RESTORED: Trust.RESTORED, Outcome.SUSPECT: Trust.SUSPECT, Outcome.CORRUPT: Trust.CORRUPT}
_MARKS = (OSError, RunDirHangs, ImportError, ValueError)
"""Errors that prevent a mark: a missing, full or hanging folder, or storage that cannot be opened here."""


@dataclass
class VerdictRecorder:
    """Records verdicts for the tested run's controller, which is the only process that may write that run's records."""

    store: Store
    files: Files
    owns: Callable[[Run], bool]

    def close_test(self, test: RestoreTest, epoch: int, now: float) -> str:
        """Close a test whose run has ended or is taking too long; return "" while it is in progress. Raises Fenced."""
        run, source = self.store.run(test.test), self._source(test)
        if not self.owns(source or run):
            return ""
        late = self._too_late(run, test, now) if run.state in LIVE_RUNS else ""
        if run.state in LIVE_RUNS and not late:
            return ""
        found = RestoreVerdict(outcome=Outcome.NOT_FINISHED, reason=late) if late else self._read_result(run)
        found.evidence.update(self._times(test, found.evidence, now))
        if source is not None:
            self._mark(source, test, found, now)

        def closed() -> None:
            self.store.end_restore_test(test.test, found.outcome, found.reason, found.evidence, epoch=epoch, now=now)
            if late:
                self.store.add_user_request(test.test, "cancel", {"now": True}, now)
            if source is not None:
                self._judge(source, test, found, epoch, now)

        self.store.together(closed)
        return f"{test.test}: step {test.step} of {test.run} on {test.layout}: {found.outcome}, {found.reason}"

    def unpin_ended(self, since: float) -> None:
        """Retry removing the pins of tests that ended after `since`. The folder or disk space may be back by now."""
        for test in self.store.restore_tests(since=since):
            if test.ended_at is None:
                continue
            source = self._source(test)
            if source is not None and self.owns(source):
                self._release(source, test)

    def _source(self, test: RestoreTest) -> Run | None:
        """Return the tested run; None if this registry no longer has it."""
        try:
            run = self.store.run(test.run)
        except NotFound:
            return None
        return run if run.name == test.run else None

    def _too_late(self, run: Run, test: RestoreTest, now: float) -> str:
        """Return why an unfinished test is abandoned so that it does not delay others; empty if it is not abandoned."""
        attempts = self.store.attempts(test.test)
        started = attempts[-1].started_at
        if started is not None:
            limit = 60.0 * self._minutes(run) + HOUR
            return f"given up after {(now - started) / HOUR:.1f} h: {run.reason}" if now - started > limit else ""
        age = now - test.begun_at
        most = START_WITHIN if run.state is RunState.CREATED else QUEUE_AT_MOST
        return f"not started within {most / HOUR:.0f} h: {run.reason}" if age > most else ""

    def _minutes(self, run: Run) -> int:
        try:
            config = build(RunConfig, self.store.config(run.config_digest))
            return minutes("cluster.time", config.cluster.time)
        except (ConfigError, ValueError, TypeError):
            return 24 * 60

    def _read_result(self, run: Run) -> RestoreVerdict:
        reports = [notice.data for notice in self.store.notices(run.name) if notice.kind == EventKind.RESTORE_TESTED]
        if not reports:
            return RestoreVerdict(outcome=Outcome.NOT_FINISHED, reason=run.reason)
        # Each rank of a user's program reports separately. A bad verdict takes precedence, then a missing one.
        report = max(reports, key=lambda data: (data["verdict"] in FOUND_BAD, data["verdict"] != Outcome.RESTORED))
        outcome, reason = Outcome(report["verdict"]), str(report["reason"])
        if outcome is Outcome.RESTORED and run.state is not RunState.SUCCEEDED:  # another rank exited earlier
            outcome, reason = Outcome.NOT_FINISHED, run.reason
        return RestoreVerdict(outcome=outcome, reason=reason, evidence=dict(report["evidence"]))

    def _times(self, test: RestoreTest, evidence: dict[str, Any], now: float) -> dict[str, float]:
        """Return the job's run time, and the time from its start to the first step less verification, in seconds."""
        attempts: list[Attempt] = self.store.attempts(test.test)
        found = {"seconds": trained_seconds(attempts, now)}
        first, verified = evidence.get("first_step_at"), evidence.get("verify_seconds")
        # The controller polls, so it may see the job running only after its ranks have started.
        began = [attempts[-1].started_at, *(item.started_at for item in self.store.generations(test.test))]
        known = [moment for moment in began if moment is not None]
        if isinstance(first, float) and known:
            found["rto_seconds"] = max(0.0, first - min(known) - (verified if isinstance(verified, float) else 0.0))
        return found

    def _mark(self, source: Run, test: RestoreTest, found: RestoreVerdict, now: float) -> None:
        """Write the verdict, then release the pin, so that retention always sees one or the other."""
        if place := _place(found):
            try:
                self.files.call(
                    Path(source.run_dir), lambda: write_verdict(source, test, place, found.outcome, found.reason, now)
                )
            except _MARKS as error:
                log.warning("%s: could not mark the verdict of %s on its copy: %s", source.name, test.test, error)
        self._release(source, test)

    def _release(self, source: Run, test: RestoreTest) -> None:
        try:
            self.files.call(Path(source.run_dir), lambda: release(source, test))
        except _MARKS as error:
            log.warning("%s: the pin of %s stays for now: %s", source.name, test.test, error)

    def _judge(self, source: Run, test: RestoreTest, found: RestoreVerdict, epoch: int, now: float) -> None:
        known = [row for row in self.store.checkpoints(source.name) if row.name == test.checkpoint]
        if found.outcome in UNDECIDED or not known:
            return
        row, trust, place = known[0], _TRUST[found.outcome], _place(found)
        why = f"restore test {test.test} on {test.layout}: {found.reason}"
        if place == (row.tier or str(RunDir(Path(source.run_dir)).checkpoints)):
            if row.trust is not trust and may_move(row.trust, trust):
                self.store.trust(source.name, test.checkpoint, trust, why, epoch=epoch, now=now)
        elif found.outcome is Outcome.CORRUPT:
            self.store.drop_copy(source.name, test.checkpoint, place, epoch=epoch)
        if found.outcome is not Outcome.RESTORED:
            data = {
                "verdict": str(found.outcome), "step": test.step, "checkpoint": test.checkpoint,
                "reason": found.reason, "test": test.test,
            }  # fmt: skip
            notice = Notice(
                run=source.name, attempt=self.store.attempts(source.name)[-1].number,
                source=f"restore-test/{test.test}", seq=1, kind=str(EventKind.RESTORE_TESTED), generation=0, time=now,
                data=data,
            )  # fmt: skip
            self.store.put_notice(notice, epoch=epoch)


def _place(found: RestoreVerdict) -> str:
    """Return the folder or URL of the tested copy; empty if the test did not read one."""
    return str(found.evidence.get("place", ""))
