"""A rank's process: from the agent's RankSpec to an exit code, and the outcome file that keeps the cause."""

import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import setproctitle
import torch
import torch.distributed as dist

from checkpointing.owner import Owner
from checkpointing.storage.backends import storage_at
from checkpointing.tiers.tier import RunTiers, resolve_tiers
from trainer.contract import skipped_batches
from trainer.contract.config import JobConfig, config_digest, load
from trainer.contract.events import EventKind
from trainer.contract.launch_token import LaunchToken, holds
from trainer.contract.outcome import ExitCode
from trainer.contract.progress import Phase, ProgressCell
from trainer.contract.rank_messages import SPEC_VARIABLE, RankSpec
from trainer.contract.run_dir import RunDir
from trainer.worker import crash_report, mesh, workload
from trainer.worker.optimizer import set_learning_rate
from trainer.worker.reporting import flight_recorder
from trainer.worker.reporting.metrics import Journal
from trainer.worker.reporting.phase_tracker import phase_tracker
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.reporting.ticker import Ticker
from trainer.worker.saved_state.train_state import Saver, TrainState
from trainer.worker.shutdown_budget import seconds_left
from trainer.worker.startup import device as devices
from trainer.worker.startup import node_benchmark, preimport, rendezvous
from trainer.worker.train_objects import TrainObjects
from trainer.worker.training.drill import Drill
from trainer.worker.training.loop import Loop, LoopServices
from trainer.worker.training.lr_schedule import learning_rate
from trainer.worker.training.save_schedule import SaveSchedule
from trainer.worker.training.spikes import SpikeDetector

if TYPE_CHECKING:
    from checkpointing.writer.link import WriterLink


def warm(config: JobConfig) -> None:
    """Import all that a rank of this run will need; touches no GPU, starts no thread, computes nothing."""
    preimport.import_lazy_parts()
    if not config.command:
        workload.find(config.workload)


def rank_main(spec: RankSpec) -> int:
    """Train as the rank that `spec` describes; returns its exit code and never raises."""
    started = time.monotonic()
    setproctitle.setproctitle(f"orch-rank-{spec.rank}")
    cell, control = ProgressCell(spec.cell_fd), socket.socket(fileno=spec.control_fd)
    control.set_inheritable(False)  # a rank that was started cold got it so; its end must be the rank's end
    ticker = Ticker(cell)
    ticker.start()
    try:
        last = crash_report.finished_outcome(spec, cell, _train(spec, cell, control, started))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  # outermost edge: kept as the outcome
        last = crash_report.failed_outcome(spec, cell, error)
    ticker.stop()
    crash_report.report_end(spec, control, last)
    return last.exit_code


def _train(spec: RankSpec, cell: ProgressCell, control: socket.socket, started: float) -> ExitCode:
    run_dir = RunDir(Path(spec.run_dir))
    config = load(run_dir, spec.attempt)
    cell.update(phase=Phase.INIT, generation=spec.generation, total_steps=config.train.steps)
    os.environ.update({**rendezvous.torchrun_environment(spec), **config.env, **spec.env})
    devices.be_deterministic(devices.threads_per_rank(config.cluster))
    _seed(config.train.seed)
    made = workload.build(config)
    if getattr(made, "strictly_deterministic", False):
        devices.be_strict()
    device = devices.choose(config.cluster, spec.local_rank)
    rendezvous.choose_interface(config.cluster.interface, spec.host)
    with flight_recorder.recording(spec):
        key = rendezvous.join(spec, control, device)
        node_benchmark.measure(spec, config, control, device)
        objects = _build(made, mesh.build(config.parallel, device, spec.rank, spec.world_size))
        flight_recorder.write_groups(spec)
        code = _restore_and_train(spec, config, run_dir, cell, objects, started, key)
        rendezvous.leave()
    return code


def _seed(seed: int) -> None:
    """Every rank starts alike, so that models built on the CPU are the same everywhere."""
    torch.manual_seed(seed)
    random.seed(seed)


def _build(made: workload.Workload, layout: mesh.Layout) -> TrainObjects:
    model = made.parallelize(made.build_model(), layout)
    optimizer = made.build_optimizer(model)
    return TrainObjects(workload=made, model=model, optimizer=optimizer, data=made.build_data(layout), layout=layout)


def _restore_and_train(
    spec: RankSpec,
    config: JobConfig,
    run_dir: RunDir,
    cell: ProgressCell,
    objects: TrainObjects,
    started: float,
    key: bytes,
) -> ExitCode:
    """Restore the newest checkpoint, if any, and train on."""
    journal = Journal(run_dir.attempt(spec.attempt), spec)
    go = run_dir.attempt(spec.attempt).go
    token = LaunchToken.read(go)
    digest = config_digest(run_dir.config_of(spec.attempt))
    if token.config_digest not in ("", digest):
        raise workload.WorkloadError(f"{run_dir.config_of(spec.attempt)} was edited while its job runs")
    saver = _checkpointer(spec, config, run_dir, token, key, journal.checkpoint)
    skip = _skipped_positions(spec, run_dir)
    train_state = TrainState(
        objects,
        config_digest=digest,
        seed=config.train.seed,
        lazy=config.checkpoint.staging.mode == "lazy",
        skip=skip,
        warn=_warner(journal, spec.rank),
        on_other_software=_on_other_software(journal, spec.rank),
    )
    _seed_by_data(config.train.seed, objects.layout)
    cell.update(phase=Phase.RESTORE)
    train_state.restore(saver)
    if train_state.step:
        set_learning_rate(objects.optimizer, learning_rate(config.train, train_state.step))
    # What came from memory need not be on any disk: only what is counts as saved.
    saved = saver.committed_step or 0
    cell.update(step=train_state.step, saved_step=saved, restored_step=train_state.step)
    services = LoopServices(
        cell=cell,
        journal=journal,
        saver=saver,
        drill=_drill(spec, config, journal, cell),
        save_schedule=_save_schedule(config, token, saved, journal),
        phases=phase_tracker(cell, objects.model, objects.layout.device),
        spike_detector=SpikeDetector(config.recovery.spike),
        started=started,
        skip=skip,
    )
    code = Loop(config, objects, train_state, services).run()
    cell.update(phase=Phase.CHECKPOINT)
    saver.close(seconds_left(cell, finished=code is ExitCode.FINISHED))
    cell.update(phase=Phase.DONE)
    journal.close()
    return code


def _warner(journal: Journal, rank: int) -> Callable[[int, str], None]:
    """Rank 0 reports what no rank could restore."""

    def warn(step: int, reason: str) -> None:
        if rank == 0:
            journal.event(EventKind.CHECKPOINT_INCOMPLETE, step=step, reason=reason)

    return warn


def _on_other_software(journal: Journal, rank: int) -> Callable[[int, dict[str, Any]], None]:
    """Rank 0 reports what the checkpoint was made with that is different now."""

    def report(step: int, changes: dict[str, Any]) -> None:
        if rank == 0:
            journal.event(EventKind.CHECKPOINT_SOFTWARE, step=step, changes=changes)

    return report


def _seed_by_data(seed: int, layout: mesh.Layout) -> None:
    """From here on dropout and the like differ between ranks with different data, and only between them."""
    torch.manual_seed(seed * 1_000_003 + layout.dp_rank)
    random.seed(seed * 1_000_003 + layout.dp_rank)


def _skipped_positions(spec: RankSpec, run_dir: RunDir) -> frozenset[int]:
    """Positions in the data at which no rank may train: what the coordinator says, and what earlier attempts found.

    Ranks that differed in it would train on different data for ever, so that all of them take those of the first one.
    """
    known = {*spec.skip, *(skip.position for skip in skipped_batches.read_all(run_dir))} if spec.rank == 0 else set()
    count = torch.tensor([len(known)])
    dist.broadcast(count, src=0)
    positions = torch.tensor(sorted(known), dtype=torch.int64) if known else torch.zeros(int(count), dtype=torch.int64)
    if int(count):
        dist.broadcast(positions, src=0)
    return frozenset(positions.tolist())


def _drill(spec: RankSpec, config: JobConfig, journal: Journal, cell: ProgressCell) -> Drill:
    def announce(kind: str, step: int) -> None:
        journal.event(EventKind.DRILL, kind=kind, rank=spec.rank, step=step)

    return Drill(
        config.drill.events,
        rank=spec.rank,
        attempt=spec.attempt,
        generation=spec.generation,
        announce=announce,
        orders=cell,
    )


def _save_schedule(config: JobConfig, token: LaunchToken, saved: int, journal: Journal) -> SaveSchedule:
    mtbf = token.mtbf or config.checkpoint.auto.node_days * 86400.0 / config.cluster.nodes
    return SaveSchedule(config.checkpoint, saved=saved, mtbf=mtbf, on_change=journal.save_interval)


def _checkpointer(
    spec: RankSpec, config: JobConfig, run_dir: RunDir, token: LaunchToken, key: bytes,
    on_event: Callable[[str, dict], None],
) -> Saver:  # fmt: skip
    """The run's checkpointer, fenced by the attempt's GO."""
    from checkpointing.engine.checkpointer import Checkpointer
    from checkpointing.engine.ranks.group import World
    from checkpointing.engine.restore.restorer import RestoreOptions

    parallel, go = config.parallel, run_dir.attempt(spec.attempt).go
    inherit = (*token.checkpoints, *token.perhaps)
    facts = {
        "size": spec.world_size,
        "dp_replicate": parallel.dp_replicate,
        "dp_shard": parallel.shard_size(spec.world_size),
        "tp": parallel.tp,
        "generation": spec.generation,
    }
    tiers = resolve_tiers(config.checkpoint, run_dir.checkpoints, run_dir.name, spec.node_name)
    return Checkpointer(
        Owner(token.attempt, token.nonce, inherit, lambda: holds(go, token), token.over),
        World(facts=facts, key=key, leads_node=spec.local_rank == 0),
        RunTiers(tiers, storage_at(run_dir.checkpoints)),
        on_event,
        config=config.checkpoint,
        link=_agent_writer(spec),
        restore=RestoreOptions(suspects=spec.suspects, optional_names=token.perhaps),
    )


def _agent_writer(spec: RankSpec) -> "WriterLink | None":
    """The writer and the memory that the agent keeps for this rank; without them the checkpointer makes its own."""
    from checkpointing.writer.link import WriterLink, WriterLost

    if spec.writer_fd < 0 or spec.arena_fd < 0:
        return None
    try:
        return WriterLink.attach(spec.writer_fd, spec.arena_fd)
    except WriterLost as error:
        write_stderr(f"orch: the agent's checkpoint writer cannot be used, starting another: {error}")
        return None


if __name__ == "__main__":
    # Threads of a process group that lost its peers must not hold up the exit.
    os._exit(rank_main(RankSpec.from_json(os.environ[SPEC_VARIABLE])))
