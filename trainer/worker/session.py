"""A rank's session after its process groups are set up, and training from a restored state."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch

from trainer.parallel.apply.gradient_buckets import CannotAverage
from trainer.parallel.apply.mesh import all_gather_json
from trainer.protocol import skipped_batches
from trainer.protocol.config import JobConfig, config_digest
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.messages.ranks import RankSpec
from trainer.protocol.rank_progress.progress import Phase, ProgressCell
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.worker.data import unwrap_data
from trainer.worker.optimizer import learning_rate, set_learning_rate
from trainer.worker.reporting.metrics import Journal, RankComparison, StepFigures
from trainer.worker.reporting.phase_tracker import ProgressLog, phase_tracker
from trainer.worker.reporting.retrained_steps import RetrainedSteps, has_new_code, read_retrained
from trainer.worker.reporting.traffic import TrafficMeter, group_dimensions, message_counters
from trainer.worker.saved_state.loss_scale import LossScale
from trainer.worker.saved_state.rng_state import seed_by_data
from trainer.worker.saved_state.train_state import RankCheckpointer, TrainObjects, TrainState
from trainer.worker.startup.late_code import record_late_code
from trainer.worker.train_loop.drill import Drill
from trainer.worker.train_loop.loop import Loop, LoopServices
from trainer.worker.train_loop.save_schedule import SaveSchedule
from trainer.worker.train_loop.spikes import SpikeDetector
from trainer.worker.workload import WorkloadError

OnSoftware = Callable[[int, dict[str, Any], dict[str, int]], None]


@dataclass(frozen=True, kw_only=True)
class RankSession:
    """Session of a rank in a generation. `key` authenticates the ranks to each other; `started` is a monotonic time."""

    spec: RankSpec
    config: JobConfig
    run_dir: RunDir
    cell: ProgressCell
    objects: TrainObjects
    started: float
    key: bytes
    on_saves: Callable[[str, int], None] = lambda trouble, size: None  # reports to the agent whether saves work
    modules: frozenset[str] = frozenset()  # modules imported before this process became a rank

    @property
    def attempt(self) -> AttemptDir:
        return self.run_dir.attempt(self.spec.attempt)

    def launch_token(self) -> LaunchToken:
        """Return the GO of this attempt. Raises WorkloadError if its config has been edited."""
        token, file = LaunchToken.read(self.attempt.go), self.run_dir.attempt_config(self.spec.attempt)
        if token.config_digest not in ("", config_digest(file)):
            raise WorkloadError(f"{file} was edited while its job was running")
        return token


def new_train_state(session: RankSession, journal: Journal, on_software: OnSoftware | None = None) -> TrainState:
    """Build the state at step 0 and seed this rank's random generators. `on_software` replaces the event."""
    config, rank = session.config, session.spec.rank
    state = TrainState(
        session.objects,
        config_digest=config_digest(session.run_dir.attempt_config(session.spec.attempt)),
        seed=config.train.seed,
        loss_scale=LossScale(config.train.dtype),
        lazy=config.checkpoint.staging.mode == "lazy",
        warn=_reporter(journal, EventKind.CHECKPOINT_INCOMPLETE, rank),
        on_other_software=on_software or _on_other_software(journal, rank),
    )
    seed_by_data(config.train.seed, session.objects.layout.generator_rank)
    session.cell.update(phase=Phase.RESTORE)
    return state


def run_training(
    session: RankSession, state: TrainState, saver: RankCheckpointer, journal: Journal, token: LaunchToken,
    skip: frozenset[int],
    *, test_until: int = 0,
) -> ExitCode:  # fmt: skip
    """Train from `state`. See LoopServices for `test_until`."""
    config, cell, objects = session.config, session.cell, session.objects
    if state.step and objects.scheduler is None:
        set_learning_rate(objects.optimizer, learning_rate(config.optimizer, config.train.steps, state.step))
    progress_log = _progress_log(session)
    progress_log.begin(state.step)
    # State restored from memory may not be on disk; only steps on disk count as saved.
    saved = saver.committed_step or 0
    cell.update(step=state.step, saved_step=saved, restored_step=state.step)
    services = LoopServices(
        cell=cell,
        journal=journal,
        saver=saver,
        drill=_drill(session.spec, config, journal, cell),
        save_schedule=_save_schedule(config, token, saved, journal),
        phases=phase_tracker(cell, objects.model, objects.layout.device),
        spike_detector=SpikeDetector(
            config.detection.spike, state.accepted_losses, _reporter(journal, EventKind.LOSS_LEVEL, session.spec.rank)
        ),
        started=session.started,
        progress_log=progress_log,
        figures=_figures(session),
        retrained=_retrained_steps(session, state.step, journal, test=bool(test_until)),
        record_code=partial(record_late_code, session.attempt, config, session.modules, journal),
        skip=skip,
        test_until=test_until,
    )
    try:
        return Loop(config, objects, state, services).run()
    except CannotAverage as error:
        raise WorkloadError(str(error)) from error


def _retrained_steps(session: RankSession, restored: int, journal: Journal, *, test: bool) -> RetrainedSteps:
    """Return the comparison of retrained steps, which is active on rank 0 if equal inputs give equal bits."""
    spec, run, device = session.spec, session.run_dir, session.objects.layout.device
    repeats = device.type == "cpu" or getattr(session.objects.workload, "strictly_deterministic", False)
    compares = restored and repeats and spec.rank == 0 and not test

    def explains(attempt: int) -> bool:
        return has_new_code(run, attempt, spec.attempt)

    def report(step: int, reason: str) -> None:
        journal.event(EventKind.RESTART_DIFFERS, step=step, restored=restored, reason=reason)

    return RetrainedSteps(
        read_retrained(run, spec.attempt, restored) if compares else {}, spec.world_size, explains, report
    )


def _figures(session: RankSession) -> StepFigures:
    objects, layout = session.objects, session.objects.layout
    flops = _positive(objects.workload, "flops_per_step")
    _positive(unwrap_data(objects.data), "tokens_per_step")
    meter = TrafficMeter(group_dimensions(layout), unrecorded=message_counters(objects.model, layout.device))
    return StepFigures(session.config, layout.device, layout.world_size, flops, meter, RankComparison())


def _positive(owner: object, name: str) -> float | None:
    """Return an optional figure from a workload or its data. Raises WorkloadError for an invalid number."""
    value = getattr(owner, name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
        raise WorkloadError(f"{type(owner).__name__}.{name} is {value!r}: must be None or a number, 0 or more")
    return float(value)


def _progress_log(session: RankSession) -> ProgressLog:
    config, data = session.config, session.objects.data
    every = config.logs.every if session.spec.rank == 0 else 0
    return ProgressLog(every, config.train.steps, getattr(data, "tokens_per_step", None))


def _reporter(journal: Journal, kind: EventKind, rank: int) -> Callable[[int, str], None]:

    def report(step: int, reason: str) -> None:
        if rank == 0:
            journal.event(kind, step=step, reason=reason)

    return report


def _on_other_software(journal: Journal, rank: int) -> OnSoftware:
    def report(step: int, changes: dict[str, Any], ranks: dict[str, int]) -> None:
        if rank == 0:
            numbers = {"ranks": ranks} if ranks else {}
            journal.event(EventKind.CHECKPOINT_SOFTWARE, step=step, changes=changes, **numbers)

    return report


def skipped_positions(spec: RankSpec, run_dir: RunDir) -> frozenset[int]:
    """Return rank 0's data positions to skip, on every rank. Collective."""
    known = {*spec.skip, *(skip.position for skip in skipped_batches.read_all(run_dir))} if spec.rank == 0 else set()
    return frozenset(all_gather_json(sorted(known), torch.device("cpu"))[0])


def _drill(spec: RankSpec, config: JobConfig, journal: Journal, cell: ProgressCell) -> Drill:
    def announce(kind: str, step: int) -> None:
        journal.event(EventKind.DRILL, kind=kind, rank=spec.rank, step=step)

    return Drill(
        config.drill.events, rank=spec.rank, attempt=spec.attempt, generation=spec.generation,
        announce=announce, orders=cell,
    )  # fmt: skip


def _save_schedule(config: JobConfig, token: LaunchToken, saved: int, journal: Journal) -> SaveSchedule:
    mtbf = token.mtbf or config.checkpoint.auto.node_days * 86400.0 / config.cluster.nodes
    return SaveSchedule(config.checkpoint, saved=saved, mtbf=mtbf, on_change=journal.save_interval)
