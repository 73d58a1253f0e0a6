"""Restore test on every rank: examine, restore, train, compare and write the verdict."""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.engine.audit.audit import AUDITS, AuditShare, audit_checkpoint, merge_reports
from checkpointing.engine.collectives.group import Failed, World, result_or_failed
from checkpointing.engine.restore.read_only import ReadOnlyCheckpoint
from checkpointing.engine.restore.restorer import Restored
from checkpointing.engine.restore.source import ONLY_RNG, OptionalKeys, TensorsFor
from checkpointing.errors import CheckpointError, NothingFits, NothingVerifies
from checkpointing.format.commit import parse_name, read_commit
from checkpointing.storage.backends import Storage, open_storage
from checkpointing.storage.durable import dump_line
from checkpointing.verification.verdicts import read_manifest_digest
from checkpointing.verification.verify import Fault, Report, read_sealed, verify_checkpoint
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.messages.ranks import RankSpec
from trainer.protocol.rank_progress.progress import Phase
from trainer.protocol.restore_test import Outcome, RestoreTestOrder, RestoreVerdict
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.user_code.code_record import CodeRecord, shorten
from trainer.worker.data import TokenData, unwrap_data
from trainer.worker.reporting.metrics import Journal
from trainer.worker.restore_test.comparison import (
    BOUNDS,
    OTHER_SOFTWARE,
    OTHER_WORDS,
    Conditions,
    compare,
    other_packages,
    recorded_steps,
    why_no_verdict,
    why_not_compared,
)
from trainer.worker.saved_state.checkpoint_contents import expected_entries
from trainer.worker.saved_state.rng_state import pack_rng
from trainer.worker.saved_state.train_state import TrainObjects, TrainState
from trainer.worker.session import RankSession, new_train_state, run_training, skipped_positions
from trainer.worker.train_loop.spikes import BadStep
from trainer.worker.workload import WorkloadError


class RestoreTestJournal(Journal):
    """Journal that also keeps the recorded steps in memory for the comparison."""

    def __init__(self, attempt: AttemptDir, spec: RankSpec) -> None:
        super().__init__(attempt, spec)
        self.first_step_at: float | None = None
        self.steps: dict[int, dict[str, float]] = {}

    def event(self, kind: EventKind, /, **data: Any) -> None:
        if kind is EventKind.GENERATION_FIRST_STEP:
            self.first_step_at = time.time()
        super().event(kind, **data)

    def step(self, step: int, **values: float) -> None:
        self.steps[step] = values
        super().step(step, **values)


class ComparedCheckpoint(ReadOnlyCheckpoint):
    """Checkpoint that checks fingerprints right after loading, before an optimizer's train mode changes weights."""

    faults: Sequence[str] = ()

    def restore(self, tensors: Mapping[str, Tensor] | TensorsFor, optional_keys: OptionalKeys = ONLY_RNG) -> Restored:
        def make_targets(extra: dict[str, Any]) -> Mapping[str, Tensor]:
            """Allocate the tensors. If a rank refuses the checkpoint, all ranks raise, so none waits for a peer."""
            made, reason = dict[str, Tensor](), ""
            try:
                made = dict(tensors(extra) if callable(tensors) else tensors)
            except WorkloadError as error:
                reason = str(error)
            if refused := next((each for each in self._ranks.all_gather(reason) if each), ""):
                raise WorkloadError(refused)
            return made

        restored = super().restore(make_targets, optional_keys)
        self.faults = self.fingerprint_faults()
        return restored


class RestoreTestRun:
    """Restore test on one rank. All ranks call `run` and get the same result."""

    def __init__(
        self,
        order: RestoreTestOrder,
        config: JobConfig,
        objects: TrainObjects,
        world: World,
        journal: RestoreTestJournal,
        attempt: AttemptDir,
    ) -> None:
        """Create two process groups. Collective."""
        self._order, self._config, self._objects = order, config, objects
        self._journal, self._attempt = journal, attempt
        self.source = ComparedCheckpoint(order.place, order.checkpoint, journal.checkpoint, world)
        self._ranks = ranks = world.group()
        self._evidence: dict[str, Any] = {
            "layout": order.layout, "ranks": ranks.size, "level": order.level, "place": order.place,
        }  # fmt: skip
        self._software: dict[str, Any] = {}

    def record_other_software(self, step: int, changes: dict[str, Any], ranks: dict[str, int]) -> None:
        """Store how the checkpoint's software differs from any rank's current software. All ranks store the same."""
        self._software = changes

    def run(self, state: TrainState, train: Callable[[int], ExitCode]) -> ExitCode:
        """Execute the order. Return FINISHED with a verdict, or STOPPED_AFTER_SAVE without a verdict.

        `train` trains up to a step. Errors that prove nothing about the checkpoint are raised, such as an unreadable
        folder or a lost peer.
        """
        fault = self._examine()
        if fault:
            return self._conclude(Outcome.CORRUPT, fault)
        unrestored = self._restore(state)
        if unrestored is not None:
            return self._conclude(*unrestored)
        before = pack_rng(self._objects.layout.device)
        try:
            code = train(self._order.last_step(self._config.train.steps))
        except BadStep as error:  # raised on every rank
            return self._conclude(*self._bad_step(error))
        if code is not ExitCode.FINISHED:
            return code
        drawn = not torch.equal(before, pack_rng(self._objects.layout.device))
        return self._conclude(*self._compare(self._conditions(drawn)))

    def _conditions(self, drawn: bool = False) -> Conditions:
        """Return the conditions of this test, which are the same on all ranks. Collective."""
        device, made, config = self._objects.layout.device, self._objects.workload, self._config
        deterministic = bool(getattr(made, "strictly_deterministic", False))
        known_data = getattr(unwrap_data(self._objects.data), "fingerprint", None) is not None
        answers = self._ranks.all_gather([drawn, device.type == "cpu" or deterministic, deterministic and known_data])
        drawn_by, repeats, promises = zip(*answers, strict=True)
        return Conditions(
            same_layout=self._order.same_layout, repeats=all(repeats), built_in=config.trains_built_in_workload,
            promises_equality=all(promises), has_agreed=bool(self._order.agreed), experts=config.model.experts.count,
            dtype=config.train.dtype, drawn=any(drawn_by), differs=self._order.differs, software=self._software,
        )  # fmt: skip

    def _examine(self) -> str:
        """Read a share of all bytes on every rank, and return the fault that rank 0 finds in the reports."""
        order, ranks, storage = self._order, self._ranks, open_storage(self._order.place)
        share = AuditShare(ranks.rank, ranks.size)
        mine = result_or_failed(lambda: dump_line(asdict(audit_share(order, storage, share))))
        reports = [_report(text) for text in self._require_answers(ranks.all_gather(mine))]
        report = merge_reports(reports)
        found = self._on_leader(lambda: {"fault": find_fault(order, storage, report)})
        self._evidence |= {"bytes": report.bytes, "verify_seconds": report.seconds, "notes": report.notes}
        return str(found["fault"])

    def _restore(self, state: TrainState) -> tuple[Outcome, str] | None:
        """Restore as a resume does; return None if the loaded values equal the saved ones."""
        started = time.monotonic()
        reason = ""
        try:
            state.restore(self.source)
        except NothingVerifies as error:  # raised on every rank
            require_checkpoint(self._order, open_storage(self._order.place))
            if any(refusal.damaged for refusal in error.refusals):
                return Outcome.CORRUPT, str(error.refusals[0])
            if isinstance(error, NothingFits):
                return Outcome.NOT_COMPARABLE, f"the program builds a different model: {error.refusals[0]}"
            raise
        except WorkloadError as error:
            reason = str(error)
        refused = next((each for each in self._ranks.all_gather(reason) if each), "")
        if refused:
            return Outcome.NOT_COMPARABLE, f"the program cannot continue from it: {refused}"
        state.compare_ranks(self._ranks.all_gather)
        restored = self.source.restore_result
        assert restored is not None
        seconds, read = time.monotonic() - started, restored.bytes_read
        rate = read / max(seconds, 1e-9)
        self._evidence |= {"restore_seconds": seconds, "bytes_read": read, "bytes_per_second": rate}
        self._evidence["fingerprints"] = self.source.has_fingerprints
        if self.source.faults:
            return Outcome.CORRUPT, f"the loaded values differ from the saved ones: {self.source.faults[0]}"
        return None

    def _bad_step(self, error: BadStep) -> tuple[Outcome, str]:
        """Judge an unusable loss. The checkpoint is only at fault if the run has trained the same step."""

        def find_step() -> dict[str, Any]:
            recorded = self._read_run_steps([error.step])[error.step]
            known = any(OTHER_SOFTWARE not in values for values in recorded)
            return {"known": known, "other": self._describe_other_software() if recorded and not known else ""}

        found = self._on_leader(find_step)
        conditions = self._conditions()
        why = why_not_compared(conditions) or self._changed_data() or why_no_verdict(conditions)
        if not found["known"]:
            why = found["other"] or why or "the run has not trained that step, so its batch may be the cause"
        return (Outcome.NOT_COMPARABLE, f"{error}; {why}") if why else (Outcome.SUSPECT, str(error))

    def _read_run_steps(self, steps: Collection[int]) -> dict[int, list[dict[str, float]]]:
        order, code = self._order, CodeRecord.read(self._attempt.code)
        return recorded_steps(RunDir(Path(order.run_dir)), steps, order.steps_digest, saving_attempt(order), code)

    def _describe_other_software(self) -> str:
        order = self._order
        mine = CodeRecord.read(self._attempt.code)
        packages = other_packages(RunDir(Path(order.run_dir)), saving_attempt(order), mine)
        return f"{OTHER_WORDS}: {shorten(packages)}" if packages else OTHER_WORDS

    def _changed_data(self) -> str:
        """Describe a token shard that has changed since it was prepared. Each rank reads some shards. Collective."""
        data, ranks = unwrap_data(self._objects.data), self._ranks

        def find_changed() -> str:
            return dump_line(data.changed_shards(ranks.rank, ranks.size) if isinstance(data, TokenData) else [])

        mine = result_or_failed(find_changed)
        found = [name for text in self._require_answers(ranks.all_gather(mine)) for name in json.loads(text)]
        return f"the data has changed since it was prepared: {found[0]} (digest differs)" if found else ""

    def _compare(self, conditions: Conditions) -> tuple[Outcome, str]:
        order, mine, exact = self._order, self._journal.steps, conditions.exact
        bounds, not_compared = BOUNDS[self._config.train.dtype], why_not_compared(conditions)

        def compare_steps() -> dict[str, Any]:
            known = self._read_run_steps(mine)
            result = compare({} if not_compared else mine, known, bounds, exact=exact)
            evidence = {
                "compared": result.compared, "exact": exact, "bounds": bounds, "largest_difference": result.largest,
                "steps": [{"step": step, **values} for step, values in sorted(mine.items())],
                "run_steps": {str(step): values for step, values in known.items()},
                "other_software": self._software, "differs": order.differs,
                "first_step_at": self._journal.first_step_at,
            }  # fmt: skip
            how = "bit for bit" if exact else f"within {bounds['loss']:g} of its loss"
            steps = "1 step agrees" if result.compared == 1 else f"{result.compared} steps agree"
            same = f"{steps} with the run's own {how}"
            none = not_compared or "the run has recorded no later step to compare with"
            why = self._describe_other_software() if result.why_no_verdict else ""
            return {
                "difference": result.difference, "why": why, "same": same if result.compared else none,
                "evidence": evidence,
            }  # fmt: skip

        found = self._on_leader(compare_steps)
        self._evidence |= found["evidence"]
        if found["difference"]:
            why = found["why"] or self._changed_data() or why_no_verdict(conditions)
            if why:
                return Outcome.NOT_COMPARABLE, f"{found['difference']}; {why}"
            return Outcome.SUSPECT, found["difference"]
        ranks = "1 rank" if self._ranks.size == 1 else f"{self._ranks.size} ranks"
        return Outcome.RESTORED, f"restored on {ranks}; {found['same']}"

    def _conclude(self, outcome: Outcome, reason: str) -> ExitCode:
        """Write the verdict on rank 0, first to the test's own folder. Without a verdict, the test has not finished."""
        verdict = RestoreVerdict(outcome=outcome, reason=reason, evidence=self._evidence)

        def write() -> dict[str, Any]:
            verdict.write(self._attempt)
            self._journal.event(
                EventKind.RESTORE_TESTED,
                verdict=str(verdict.outcome), reason=verdict.reason, evidence=verdict.evidence,
            )  # fmt: skip
            return {}

        self._on_leader(write)
        return ExitCode.FINISHED

    def _on_leader(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run `act` on rank 0 and return its JSON on every rank. Raises OSError on all ranks if it fails."""
        mine: str | Failed | None = result_or_failed(lambda: dump_line(act())) if self._ranks.leads else None
        found: dict[str, Any] = json.loads(self._require_answers([self._ranks.broadcast(mine)])[0])
        return found

    @staticmethod
    def _require_answers(answers: Sequence[str | Failed]) -> list[str]:
        failed = next((each for each in answers if isinstance(each, Failed)), None)
        if failed is not None:
            raise OSError(failed.reason)
        return [each for each in answers if not isinstance(each, Failed)]

    def close(self) -> None:
        """Release the process groups."""
        self.source.close()
        self._ranks.close()


def _report(text: str) -> Report:
    fields = json.loads(text)
    faults = tuple(Fault(**{**fault, "tensors": tuple(fault["tensors"])}) for fault in fields["faults"])
    return Report(**{**fields, "faults": faults, "notes": tuple(fields["notes"])})


def run_restore_test(order: RestoreTestOrder, session: RankSession) -> ExitCode:
    """Run this rank's part of the restore test, from the order to the verdict."""
    journal = RestoreTestJournal(session.attempt, session.spec)
    token = session.launch_token()
    world = World(
        facts={"size": session.spec.world_size}, key=session.key, leads_node=session.spec.local_rank == 0
    )  # fmt: skip
    test = RestoreTestRun(order, session.config, session.objects, world, journal, session.attempt)
    skip = skipped_positions(session.spec, RunDir(Path(order.run_dir)))
    state = new_train_state(session, journal, test.record_other_software)
    code = test.run(
        state, lambda until: run_training(session, state, test.source, journal, token, skip, test_until=until)
    )
    session.cell.update(phase=Phase.CHECKPOINT)
    test.close()
    session.cell.update(phase=Phase.DONE)
    journal.close()
    return code


def audit_share(order: RestoreTestOrder, storage: Storage, share: AuditShare) -> Report:
    """Verify this rank's share of the checkpoint at the order's level. Raises OSError if it does not exist."""
    require_checkpoint(order, storage)
    if order.level not in AUDITS:
        return verify_checkpoint(storage, order.checkpoint, order.level, choose=share.take_chunks)
    return audit_checkpoint(storage, order.checkpoint, order.level, expect=expected_entries, share=share)


def find_fault(order: RestoreTestOrder, storage: Storage, report: Report) -> str:
    """Return the fault found in the ranks' combined `report` or the checkpoint's origin, or "" if there is none.

    Raises OSError if the checkpoint is currently unreadable, deleted or not visible, which does not prove damage.
    """
    faults = [fault for fault in report.faults if fault.is_damage]
    if report.faults:
        require_checkpoint(order, storage)  # if the file system is gone, the files look missing
        if not faults:
            raise OSError(f"{order.place}/{order.checkpoint}: {report.faults[0]}")
        more = len(faults) - 1
        return f"{faults[0]}{f' (and {more} more faults)' if more > 0 else ''}"
    return _origin_fault(order, storage)


def require_checkpoint(order: RestoreTestOrder, storage: Storage) -> None:
    """Raise OSError unless the checkpoint exists and is committed."""
    try:
        read_commit(storage, order.checkpoint)
    except CheckpointError:
        return  # it exists but is damaged, which the verification reports
    except FileNotFoundError as error:
        if order.checkpoint in storage.list(""):
            files = storage.list(order.checkpoint)
            if len(files) > 1 and "DELETED" not in files:
                return  # only COMMIT is missing, which is damage
        raise OSError(f"{order.place}/{order.checkpoint} is missing: deleted, or not visible on this node") from error


def saving_attempt(order: RestoreTestOrder) -> int:
    """Return the attempt that saved the checkpoint, or 0 if the run started from it."""
    parts = parse_name(order.checkpoint)
    return parts.attempt if parts is not None and order.config_digest else 0


def _origin_fault(order: RestoreTestOrder, storage: Storage) -> str:
    """Return a fault if the manifest was rewritten or the checkpoint was saved with another config, else ""."""
    digest = read_manifest_digest(storage, order.checkpoint)
    if order.manifest and digest != order.manifest:
        return f"MANIFEST: was rewritten: its digest is {digest}, not {order.manifest}, as recorded at its commit"
    manifest, _ = read_sealed(storage, order.checkpoint)
    if manifest is None:
        return ""
    saved_with = manifest.extra.get("config_digest")
    if order.config_digest and saved_with is not None and saved_with != order.config_digest:
        return f"MANIFEST: it was saved with config {saved_with}, but its attempt trained with {order.config_digest}"
    return ""
