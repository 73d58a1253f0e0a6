"""The course of a restore test on every rank: examine, restore, train, compare, write the verdict."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.engine.ranks.failure import Failed, result_or_failed
from checkpointing.engine.ranks.group import World
from checkpointing.engine.restore.read_only import ReadOnlyCheckpoint
from checkpointing.engine.restore.restorer import Restored
from checkpointing.engine.restore.source import TensorsFor
from checkpointing.errors import NothingVerifies
from checkpointing.storage.backends import storage_at
from checkpointing.storage.durable import dump_line
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind
from trainer.contract.failures.outcome import ExitCode
from trainer.contract.ranks.progress import Phase
from trainer.contract.ranks.rank_messages import RankSpec
from trainer.contract.restore_test import Outcome, RestoreTest, RestoreVerdict
from trainer.contract.run_dir import AttemptDir, RunDir
from trainer.worker.reporting.metrics import Journal
from trainer.worker.restore_test.examination import examine, require_there, saving_attempt
from trainer.worker.restore_test.recorded_steps import BOUNDS, compare, recorded_steps
from trainer.worker.saved_state.checkpoint_contents import shared_tensors
from trainer.worker.saved_state.data_state import NotReshardable
from trainer.worker.saved_state.rng_state import pack_rng
from trainer.worker.saved_state.train_state import TrainState
from trainer.worker.session import Session, new_train_state, skipped_positions, train_on
from trainer.worker.train_objects import TrainObjects
from trainer.worker.training.spikes import BadStep
from trainer.worker.workload import WorkloadError


class RestoreTestJournal(Journal):
    """A journal that also remembers what it is told: the numbers that the test is about."""

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
    """Compares what it has loaded at once: an optimizer that is put into its training mode may change weights."""

    faults: Sequence[str] = ()

    def restore(
        self,
        tensors: Mapping[str, Tensor] | TensorsFor,
        *,
        optional_prefixes: tuple[str, ...] = ("rng/",),
        optional_folders: tuple[str, ...] = (),
    ) -> Restored:
        restored = super().restore(
            tensors, optional_prefixes=optional_prefixes, optional_folders=optional_folders
        )  # fmt: skip
        self.faults = self.fingerprint_faults()
        return restored


class RestoreTestRun:
    """One test on one rank; all ranks call `run` and get the same result."""

    def __init__(
        self,
        order: RestoreTest,
        config: JobConfig,
        objects: TrainObjects,
        world: World,
        journal: RestoreTestJournal,
        attempt: AttemptDir,
    ) -> None:
        """Create two process groups: collective."""
        self._order, self._config, self._objects = order, config, objects
        self._journal, self._attempt = journal, attempt
        self.source = ComparedCheckpoint(order.place, order.checkpoint, journal.checkpoint, world)
        self._ranks = ranks = world.group()
        self._evidence: dict[str, Any] = {
            "layout": order.layout, "ranks": ranks.size, "level": order.level, "place": order.place,
        }  # fmt: skip
        self._software: dict[str, Any] = {}

    def other_software(self, step: int, changes: dict[str, Any]) -> None:
        """What the checkpoint was made with that is different now."""
        self._software = changes

    def run(self, state: TrainState, train: Callable[[int], ExitCode]) -> ExitCode:
        """Carry the order out: FINISHED with a verdict, STOPPED_AFTER_SAVE without one.

        `train` trains up to a step. Raises what says nothing about the checkpoint: a place that cannot be read, a peer
        that is gone.
        """
        fault = self._examined() or self._restored(state)
        if fault:
            return self._concluded(RestoreVerdict(outcome=Outcome.CORRUPT, reason=fault, evidence=self._evidence))
        before = pack_rng(self._objects.layout.device)
        try:
            code = train(self._order.last_step(self._config.train.steps))
        except BadStep as error:  # on every rank alike
            return self._concluded(RestoreVerdict(outcome=Outcome.SUSPECT, reason=str(error), evidence=self._evidence))
        if code is not ExitCode.FINISHED:
            return code
        drawn = not torch.equal(before, pack_rng(self._objects.layout.device))
        return self._concluded(self._judged(self._not_comparable(any(self._ranks.all_gather(drawn)))))

    @property
    def _exact(self) -> bool:
        """Whether equal bits are to be expected: the same layout, software and code, and kernels that repeat them."""
        device, made = self._objects.layout.device, self._objects.workload
        repeats = device.type == "cpu" or getattr(made, "strictly_deterministic", False)
        return self._order.same_layout and repeats and not self._software and not self._order.differs

    def _not_comparable(self, drawn: bool) -> str:
        """Why its steps cannot be held to the run's; `drawn`: random numbers were, which differ between layouts."""
        if "code.user" in self._order.differs:
            return "the run's own code (code.user) is not what it was trained with: its steps are not compared"
        if drawn and not self._order.same_layout:
            return "it draws random numbers, other ones on another layout: its steps are not compared"
        return ""

    def _examined(self) -> str:
        """Rank 0 reads all of it; the others wait for what it has found."""

        def examined() -> dict[str, Any]:
            found = examine(self._order, storage_at(self._order.place), shared_tensors(self._objects.model))
            return asdict(found)

        found = self._on_leader(examined)
        self._evidence |= {"bytes": found["bytes"], "verify_seconds": found["seconds"], "notes": found["notes"]}
        return str(found["fault"])

    def _restored(self, state: TrainState) -> str:
        """Restore as a resume does; empty when what was loaded is what was saved."""
        started = time.monotonic()
        try:
            state.restore(self.source)
        except NothingVerifies as error:
            require_there(self._order, storage_at(self._order.place))
            if not any(refusal.damaged for refusal in error.refusals):
                raise
            return str(error.refusals[0])
        except NotReshardable:  # says nothing about the checkpoint
            raise
        except WorkloadError as error:
            return str(error)
        restored = self.source.restored
        assert restored is not None
        seconds, read = time.monotonic() - started, restored.bytes_read
        rate = read / max(seconds, 1e-9)
        self._evidence |= {"restore_seconds": seconds, "bytes_read": read, "bytes_per_second": rate}
        self._evidence["fingerprints"] = self.source.has_fingerprints
        if self.source.faults:
            return f"what was loaded is not what was saved: {self.source.faults[0]}"
        if state.step != self._order.step:
            return f"the model is of step {state.step}, the checkpoint of step {self._order.step}"
        return ""

    def _judged(self, not_comparable: str) -> RestoreVerdict:
        """Hold the steps to those of the run: rank 0 has both."""
        order, mine, exact = self._order, self._journal.steps, self._exact
        bounds = BOUNDS[self._config.train.dtype]

        def judged() -> dict[str, Any]:
            known = recorded_steps(RunDir(Path(order.run_dir)), mine, order.steps_digest, saving_attempt(order))
            found = compare({} if not_comparable else mine, known, bounds, exact=exact)
            evidence = {
                "compared": found.compared, "exact": exact, "bounds": bounds, "largest_difference": found.largest,
                "steps": [{"step": step, **values} for step, values in sorted(mine.items())],
                "run_steps": {str(step): values for step, values in known.items()},
                "other_software": self._software, "differs": order.differs,
                "first_step_at": self._journal.first_step_at,
            }  # fmt: skip
            how = "bit for bit" if exact else f"within {bounds['loss']:g} of its loss"
            steps = "1 step agrees" if found.compared == 1 else f"{found.compared} steps agree"
            same = f"{steps} with the run's own {how}"
            none = not_comparable or "the run has recorded no step after it to compare with"
            return {"difference": found.difference, "same": same if found.compared else none, "evidence": evidence}

        told = self._on_leader(judged)
        self._evidence |= told["evidence"]
        if told["difference"]:
            return RestoreVerdict(outcome=Outcome.SUSPECT, reason=told["difference"], evidence=self._evidence)
        ranks = "1 rank" if self._ranks.size == 1 else f"{self._ranks.size} ranks"
        reason = f"restored on {ranks}; {told['same']}"
        return RestoreVerdict(outcome=Outcome.RESTORED, reason=reason, evidence=self._evidence)

    def _concluded(self, verdict: RestoreVerdict) -> ExitCode:
        """Rank 0 writes it down, first into the test's own folder; an unwritten one must not look like an end."""

        def written() -> dict[str, Any]:
            verdict.write(self._attempt)
            self._journal.event(
                EventKind.RESTORE_TESTED,
                verdict=str(verdict.outcome), reason=verdict.reason, evidence=verdict.evidence,
            )  # fmt: skip
            return {}

        self._on_leader(written)
        return ExitCode.FINISHED

    def _on_leader(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What rank 0 finds, as plain JSON, on every rank; raises OSError on all of them when it could not."""
        mine: str | Failed | None = result_or_failed(lambda: dump_line(act())) if self._ranks.leads else None
        told: str | Failed = self._ranks.broadcast(mine)
        if isinstance(told, Failed):
            raise OSError(told.reason)
        found: dict[str, Any] = json.loads(told)
        return found

    def close(self) -> None:
        """Give the process groups back."""
        self.source.close()
        self._ranks.close()


def carry_out(order: RestoreTest, session: Session) -> ExitCode:
    """The restore test of this rank, from the order to the verdict."""
    journal = RestoreTestJournal(session.attempt, session.spec)
    token = session.launch_token()
    world = World(
        facts={"size": session.spec.world_size}, key=session.key, leads_node=session.spec.local_rank == 0
    )  # fmt: skip
    test = RestoreTestRun(order, session.config, session.objects, world, journal, session.attempt)
    skip = skipped_positions(session.spec, RunDir(Path(order.run_dir)))
    state = new_train_state(session, journal, skip, test.other_software)
    code = test.run(state, lambda until: train_on(session, state, test.source, journal, token, skip, test_until=until))
    session.cell.update(phase=Phase.CHECKPOINT)
    test.close()
    session.cell.update(phase=Phase.DONE)
    journal.close()
    return code
