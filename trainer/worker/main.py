"""A rank's process, from its RankSpec to its exit code and outcome file."""

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from torch import nn

from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.engine.restore.restorer import RestoreOptions
from checkpointing.process_title import set_title
from checkpointing.storage.backends import open_storage
from checkpointing.storage.trusted_path import pin_path
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import RunTiers, one_folder, resolve_tiers
from checkpointing.writer.link import WriterLink, WriterLost
from trainer.parallel.apply import mesh
from trainer.protocol.config import JobConfig, load
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.launch_token import LaunchToken, holds
from trainer.protocol.messages.ranks import RankSpec, report_saves
from trainer.protocol.rank_progress.progress import Phase, ProgressCell, StopReason
from trainer.protocol.restore_test import read_order
from trainer.protocol.run_dir import RunDir
from trainer.protocol.secrets.secret_redaction import in_use
from trainer.worker import crash_report, workload
from trainer.worker.data import with_position
from trainer.worker.reporting import flight_recorder
from trainer.worker.reporting.metrics import Journal
from trainer.worker.reporting.phase_tracker import ProgressTicker
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.saved_state.data_state import require_resharding
from trainer.worker.saved_state.rng_state import seed_generators
from trainer.worker.saved_state.train_state import TrainObjects
from trainer.worker.session import RankSession, new_train_state, run_training, skipped_positions
from trainer.worker.startup import node_benchmark, rendezvous
from trainer.worker.startup.preimport import protect_data_loader_workers

_EXIT_MARGIN = 5.0
"""Seconds reserved before the agent's deadline to wait for peers, write the outcome and exit."""
_UNLIMITED, _PEERS_STOPPED = 1800.0, 20.0
"""Seconds allowed if there is no deadline, or if a stop request has reached only other ranks."""


def seconds_left(
    cell: ProgressCell, *, finished: bool, clock: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a function that returns the remaining seconds. A later stop request reduces them."""
    began = clock()

    def left() -> float:
        reason, deadline = cell.read_stop_request()
        if reason <= StopReason.SAVE_AND_GO_ON:
            # A finished run that waited for a stop request would look like an interrupted one.
            deadline = cell.read_expected_stop() if finished else 0.0
        until = deadline or began + (_UNLIMITED if finished else _PEERS_STOPPED)
        return until - _EXIT_MARGIN - clock()

    return left


def rank_main(spec: RankSpec) -> int:
    """Train as the rank described by `spec` and return its exit code. Never raises."""
    started, modules, process = time.monotonic(), frozenset(sys.modules), os.getpid()
    set_title(f"orch-rank-{spec.rank}")
    protect_data_loader_workers()
    in_use()  # before the program can delete the variables from its environment
    cell, control = ProgressCell(spec.cell_fd), socket.socket(fileno=spec.control_fd)
    control.settimeout(None)  # the user's module may have called `socket.setdefaulttimeout`
    control.set_inheritable(False)  # inheritable in a cold-started rank, but it must close when the rank exits
    ticker = ProgressTicker(cell)
    ticker.start()
    try:
        last = crash_report.build_outcome(spec, cell, _train(spec, cell, control, started, modules))
    except BaseException as error:  # noqa: BLE001  # outermost edge: recorded as the outcome
        if os.getpid() != process:
            _end_forked_process(error)
        last = crash_report.failed_outcome(spec, cell, error)
    ticker.stop()
    crash_report.report_end(spec, control, last)
    return int(last.exit_code or 0)


def _end_forked_process(error: BaseException) -> NoReturn:
    """Exit a process that the workload forked, with the exit code of a Python program. The rank itself continues."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    else:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _train(
    spec: RankSpec, cell: ProgressCell, control: socket.socket, started: float, modules: frozenset[str]
) -> ExitCode:
    run_dir = RunDir(Path(spec.run_dir), known_as=Path(spec.known_as) if spec.known_as else None)
    config = load(run_dir, spec.attempt)
    cell.update(phase=Phase.INIT, generation=spec.generation, total_steps=config.train.steps)
    os.environ.update({**spec.torchrun_variables(), **config.env, **spec.env})
    rendezvous.be_deterministic(rendezvous.threads_per_rank(config.cluster))
    seed_generators(config.train.seed)  # the same on all ranks, so that models built on the CPU are too
    made = workload.build(config)
    if getattr(made, "strictly_deterministic", False):
        rendezvous.be_strict()
    device = rendezvous.choose(config.cluster, spec.local_rank)
    rendezvous.choose_interface(config.cluster.interface, spec.host)
    with flight_recorder.recording(spec):
        store, key = rendezvous.join(spec, control, device)
        node_benchmark.measure(spec, config, control, device)
        objects = _build(made, config, mesh.build(config.parallel, device, spec.rank, spec.world_size))
        require_resharding(objects.data, config.cluster)
        flight_recorder.write_groups(spec)
        session = RankSession(
            spec=spec, config=config, run_dir=run_dir, cell=cell, objects=objects, started=started, key=key,
            on_saves=partial(report_saves, control), modules=modules,
        )  # fmt: skip
        code = _restore_and_train(session)
        rendezvous.leave(store, spec)
    return code


def _build(made: workload.Workload, config: JobConfig, layout: mesh.Layout) -> TrainObjects:
    model, set_initial_weights = _model(made, config, layout)
    optimizer = workload.build_optimizer(made, model)
    scheduler = workload.build_scheduler(made, optimizer)
    data = with_position(made.build_data(layout))
    return TrainObjects(
        workload=made, model=model, optimizer=optimizer, data=data, layout=layout, scheduler=scheduler,
        set_initial_weights=set_initial_weights,
    )  # fmt: skip


def _model(
    made: workload.Workload, config: JobConfig, layout: mesh.Layout
) -> tuple[nn.Module, Callable[[], None] | None]:
    """Return this rank's model and a function that sets its initial weights, or None if it has them already."""
    if not config.trains_built_in_workload:
        own = made.parallelize(made.build_model(), layout)
        if not any(module.training for module in own.modules()):  # `from_pretrained` returns models in eval mode
            own.train()
        set_weights = getattr(made, "set_initial_weights", None)
        return own, partial(set_weights, own) if callable(set_weights) else None
    model = cast(Any, made).build_sharded(layout)
    return model, partial(model.set_initial_weights, config.train.seed)


def _restore_and_train(session: RankSession) -> ExitCode:
    """Restore the newest checkpoint, if any, and continue training, or carry out a restore-test order."""
    order = read_order(session.run_dir)
    if order is not None:
        from trainer.worker.restore_test.run import run_restore_test  # needed only here

        with suppress(FileNotFoundError):  # whatever reads the folder reports that it is missing
            order = replace(order, run_dir=str(pin_path(Path(order.run_dir))))
        return run_restore_test(order, session)
    journal = Journal(session.attempt, session.spec, session.on_saves)
    try:
        return _train_from_newest(session, journal)
    finally:
        journal.close()


def _train_from_newest(session: RankSession, journal: Journal) -> ExitCode:
    token = session.launch_token()
    saver = _checkpointer(session, token, journal.checkpoint)
    skip = skipped_positions(session.spec, session.run_dir)
    state = new_train_state(session, journal)
    state.restore(saver)
    state.compare_ranks(saver.all_gather)
    code = run_training(session, state, saver, journal, token, skip)
    session.cell.update(phase=Phase.CHECKPOINT)
    saver.close(seconds_left(session.cell, finished=code is ExitCode.FINISHED))
    session.cell.update(phase=Phase.DONE)
    return code


def _checkpointer(
    session: RankSession, token: LaunchToken, on_event: Callable[[str, dict[str, Any]], None]
) -> Checkpointer:
    spec, config, run_dir = session.spec, session.config, session.run_dir
    go = session.attempt.go
    inherit = (*token.checkpoints, *token.perhaps)
    facts = {
        "size": spec.world_size,
        **config.parallel.mesh_sizes(spec.world_size),
        "generation": spec.generation,
    }
    tiers = resolve_tiers(
        config.checkpoint, run_dir.checkpoints, run_dir.name, spec.node_name, known_as=run_dir.own_path
    )
    if not inherit and (same := one_folder(tiers)):  # a node's own disk is visible only to that node
        raise ValueError(f"checkpoint.tiers: two tiers use the same folder: {same[0]} and {same[1]}; remove one")
    return Checkpointer(
        Owner(token.attempt, token.nonce, inherit, lambda: holds(go, token), token.over),
        World(facts=facts, key=session.key, leads_node=spec.local_rank == 0),
        RunTiers(tiers, open_storage(run_dir.checkpoints)),
        on_event,
        config=config.checkpoint,
        link=_agent_writer(spec),
        restore=RestoreOptions(suspects=spec.suspects, optional_names=token.perhaps, corrupt=token.corrupt),
    )


def _agent_writer(spec: RankSpec) -> WriterLink | None:
    """Return the agent's writer and memory for this rank. If None, the checkpointer starts its own."""
    if spec.writer_fd < 0 or spec.arena_fd < 0:
        return None
    try:
        return WriterLink.attach(spec.writer_fd, spec.arena_fd)
    except WriterLost as error:
        write_stderr(f"orch: the agent's checkpoint writer cannot be used, starting another: {error}")
        return None
