"""`orch cancel` and `orch resume`: user requests, recorded for the controller to answer."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.access.registry import open_store, wake_controller
from orchestrator.cli.access.run_folder import (
    PUT_BACK,
    START,
    RunLocation,
    controller_state,
    existing_folder,
    locate_run,
)
from orchestrator.cli.access.slurm_environment import warn_of_silence
from orchestrator.cli.runs.config_changes import warn_of_edited_config
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError, NotFound, OrchError, Precondition, SlurmUnreachable
from orchestrator.registry.records import REFUSED, Attempt, Run
from orchestrator.run_view import find_run, repeat_test_command
from orchestrator.states import LIVE_ATTEMPTS, LIVE_RUNS, RunState, may_move
from trainer.protocol.config_sections.scheduler_kinds import traits

NO_CONTROLLER = click.option("--no-controller", is_flag=True, help="Do not start a controller; act once from here.")
ANSWER_TIMEOUT = 30.0
"""Seconds to wait for the controller's answer before the command shows how to check later."""
QUIET = 2.0
"""Seconds to wait before the command shows a message."""


def _require_a_run(context: click.Context, parameter: click.Parameter, runs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the runs. Raises MissingParameter without any, unless a sweep is named."""
    if not runs and context.params.get("sweep") is None and not context.resilient_parsing:
        raise click.MissingParameter(ctx=context, param=parameter)
    return runs


@click.command(cls=Verb)
@click.argument("runs", metavar="RUN...", nargs=-1, callback=_require_a_run)
@click.option("--sweep", metavar="NAME", is_eager=True, help="All runs of this sweep that have not ended.")
@NO_CONTROLLER
@click.pass_obj
def cancel(screen: Screen, runs: tuple[str, ...], sweep: str | None, no_controller: bool) -> int:
    """Save a checkpoint, then stop the runs (`orch resume` continues them).

    RUN is a full name, or @last. The command starts a controller if none is alive, and waits up to 30 seconds for
    the answer. The exit code is 4 if the run has succeeded, or if it belongs to another cluster that has no live
    controller (the next controller there gets the request). It is 5 if Slurm does not answer; the request stands.
    """
    if sweep is not None:
        from orchestrator.cli.runs.sweep_table import find_sweep

        unfinished = [view for view in find_sweep(sweep) if view.is_live or view.state == RunState.HELD]
        # Those that have not started come first, so that none takes the place of one that ends.
        runs += tuple(view.run for view in sorted(unfinished, key=lambda view: view.state != RunState.CREATED))
        if not runs:
            screen.answer("cancel", [], f"every run of the sweep {sweep} has ended")
            return 0
    return _request_each(screen, "cancel", runs, RunState.CANCELLED, no_controller)


@click.command(cls=Verb)
@click.argument("words", metavar="RUN... [KEY=VALUE...]", nargs=-1, required=True)
@NO_CONTROLLER
@click.option(
    "--here", is_flag=True,
    help="Move a run from another cluster to the one this host can reach, if none of its jobs can still be alive.",
)  # fmt: skip
@click.option(
    "--accept", multiple=True, metavar="KEY", help="Accept a difference from the run, such as code.user; repeatable."
)
@click.pass_obj
def resume(screen: Screen, words: tuple[str, ...], no_controller: bool, here: bool, accept: tuple[str, ...]) -> int:
    """Continue a run that is held, failed or cancelled, from its newest good checkpoint, with a fresh budget.

    RUN is a full name, or @last. KEY=VALUE changes its configuration from the next attempt on: learning rate,
    nodes, layout, partition. A run that has succeeded continues if you raise `train.steps`. Without a checkpoint
    the run begins at step 0, and all but its name, root, kind of cluster and `workload.snapshot` may change.

    If code, packages or data differ from the run's, accept each difference with --accept KEY (docs/configuration.md
    lists the keys). Variables of `env_from` that are set in this shell replace the run's. The exit code is 4 if the
    run's folder is gone, or if another registry has continued the run (`orch db rebuild -h`).
    """
    overrides = tuple(word for word in words if "=" in word or word.startswith(("~", "+")))
    runs = tuple(word for word in words if word not in overrides)
    if not runs:
        raise ConfigError("no run is named", where=" ".join(words), hint="orch resume RUN KEY=VALUE")
    if overrides:
        from orchestrator.config.layers import from_overrides  # imports yaml, needed only to change a configuration

        from_overrides(overrides)  # refuses invalid overrides before anything is requested
    for run in runs:
        with suppress(OrchError):  # the request itself reports a wrong name
            warn_of_edited_config(screen, find_run(run))
    change = ResumeOptions(overrides=overrides, accepted=accept, note=screen.note)
    return _request_each(screen, "resume", runs, RunState.RECOVERING, no_controller, here=here, change=change)


@dataclass(frozen=True)
class ResumeOptions:
    """Changes that `orch resume` makes to a run, and the differences that the user accepts."""

    overrides: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    note: Callable[[str], None] = lambda words: None


@dataclass(kw_only=True)
class PendingRequest:
    """A user's request about a run or a node. `id` is None if no answer from the controller is needed."""

    run: str
    kind: str
    where: RunLocation
    state: str = ""
    id: int | None = None
    answer: str = ""
    node: str = ""

    @property
    def needs_controller(self) -> bool:
        """Whether a controller must act here, either on the request or because a live run has no controller."""
        is_orphan = self.state in LIVE_RUNS and not self.where.lives
        return self.where.reached and (self.id is not None or is_orphan)


def serve_requests(screen: Screen, store: Any, requests: list[PendingRequest], *, no_controller: bool) -> bool:
    """Let controllers act on recorded requests, and wait for the answers.

    Warns about each scheduler that does not answer, and returns whether any request is waiting for one.
    """
    kinds = sorted({each.kind for each in requests if each.needs_controller})
    silent = {kind: wake_controller(screen, kind, no_controller=no_controller) for kind in kinds}
    answerable = [each for each in requests if each.where.reached or each.where.lives]
    await_answers(screen, store, answerable, no_controller)
    waits = {(each.kind, each.where.scheduler) for each in answerable if not each.answer}
    return any([warn_of_silence(screen, kind, key, silent.get(kind, "")) for kind, key in sorted(waits)])


def _request_each(
    screen: Screen, verb: str, names: tuple[str, ...], target: RunState, no_controller: bool, *, here: bool = False,
    change: ResumeOptions | None = None,
) -> int:  # fmt: skip
    """Record one request per run, let the controller act, and print its answers.

    With several runs, a refused request does not stop the others; the exit code is that of the first refusal.
    """
    requests: list[PendingRequest] = []
    screen.if_interrupted = lambda: _interrupt_message(verb, requests)
    refused: OrchError | None = None
    with open_store() as store:
        for name in names:
            try:
                requests.append(_request(store, verb, name, target, here, change))
            except OrchError as error:
                refused = refused or error
                if len(names) > 1:
                    screen.warn(type(error).__name__, error.what)
        unanswered = serve_requests(screen, store, requests, no_controller=no_controller)
    if refused is not None and not requests:
        raise refused
    _print_answers(screen, verb, requests)
    if refused is not None:
        return refused.exit_code
    for item in requests:
        if not item.answer:
            item.where.require_answer()
    if any(item.answer.startswith(REFUSED) for item in requests):
        return Precondition.exit_code
    return SlurmUnreachable.exit_code if unanswered else 0


def _interrupt_message(verb: str, requests: list[PendingRequest]) -> str:
    recorded = [item for item in requests if item.id is not None]
    if not recorded:
        return "interrupted: nothing was requested"
    lives = controller_state(recorded[0].where.scheduler).alive
    acts = "the controller will act on it" if lives else f"no controller is running to act on it; {START}"
    looks = "".join(f"\n  orch status {item.run}" for item in recorded)
    return (
        f"interrupted: the request to {verb} {', '.join(item.run for item in recorded)} is recorded, and {acts}{looks}"
    )


def _request(
    store: Any, verb: str, name: str, target: RunState, here: bool, change: ResumeOptions | None
) -> PendingRequest:
    run = store.run(name)
    _check_request(verb, name, run)
    attempts = store.attempts(run.name)
    key = _key_here(run.cluster, must=here) if here or not run.scheduler else ""
    is_stopped = run.state not in (*LIVE_RUNS, RunState.CANCELLED)
    if is_stopped and not run.scheduler and not traits(run.cluster).simulated_nodes:
        _require_cluster(verb, run, key, attempts)
    where = locate_run(run.name, run.cluster, key or run.scheduler)
    moves = here and key not in ("", run.scheduler)
    item = PendingRequest(run=run.name, state=run.state, kind=run.cluster, where=where)
    if moves and run.scheduler and _may_have_job(attempts):
        what = f"{run.name} may have a live job on {run.scheduler}, which no controller here has found"
        hint = f"let the job end, or run `orch cancel {run.name}` there"
        raise Precondition(what, where=run.reason, hint=hint)
    if verb == "cancel" and run.state is RunState.CANCELLED:
        return replace(item, answer="was cancelled already")
    if verb == "resume":
        _require_folder(run, attempts, store.path)
        if run.state in LIVE_RUNS and not (moves and not (change and change.overrides)):
            _refuse_live(store, run, change)
            return replace(item, answer="is already live")
    if not may_move(run.state, target) and run.state not in LIVE_RUNS:
        what = f"{run.name} is {run.state}: it cannot be {'cancelled' if verb == 'cancel' else 'resumed'}"
        raise Precondition(what, where=run.reason, hint=f"`orch show {run.name}` shows what happened")
    changed: dict[str, Any] = {}
    if change is not None:
        from orchestrator.submission.resume_request import resume_request  # imports omegaconf, needed only here

        changed = resume_request(store, run, change.overrides, change.accepted, change.note)
    request_id = store.add_user_request(run.name, verb, ({"here": key} if key else {}) | changed, now=time.time())
    return replace(item, id=request_id)


def _check_request(verb: str, name: str, run: Run) -> None:
    """Raise NotFound for a partial name, or Precondition for resuming a restore test or a run that is being removed."""
    if name not in (run.name, "@last"):
        raise NotFound(f"no run {name}", hint=f"{verb} needs the full name, to avoid the wrong run; is it {run.name}?")
    if verb == "resume" and (order := run.identity.get("restore_test")) is not None:
        what = f"{run.name} is a restore test: it runs once and cannot be resumed"
        where = f"it restores {order['run']}@{order['step']}"
        raise Precondition(what, where=where, hint=repeat_test_command(order))
    if verb == "resume" and run.removal:
        hint = f"`orch rm {run.name} -y` finishes the removal"
        raise Precondition(f"{run.name} is being removed", where=run.run_dir, hint=hint)


def _require_cluster(verb: str, run: Run, key: str, attempts: list[Attempt]) -> None:
    """Check that this host's cluster may be used for a stopped run whose cluster is unknown.

    Raises SlurmUnreachable if Slurm does not answer here, and Precondition if a cancel might miss a live job.
    """
    unknown = f"it is not known which cluster has the jobs of {run.name}"
    if not key:
        hint = "run the same command again in a shell where `sinfo` answers; nothing was requested"
        raise SlurmUnreachable(f"{run.cluster} does not answer, and {unknown}", where=run.reason, hint=hint)
    if verb == "cancel" and may_move(run.state, RunState.CANCELLED) and _may_have_job(attempts):
        hint = f"if it is this one ({key}): `orch resume {run.name} --here`, then `orch cancel {run.name}`"
        raise Precondition(unknown, where=run.reason, hint=hint)


def _require_folder(run: Run, attempts: list[Attempt], registry: Path) -> None:
    """Raise Precondition if the run's folder is missing, has lost its `run.json`, or is used by another registry.

    The folder of a live run that was never submitted may not exist yet.
    """
    from orchestrator.controller.ownership import never_submitted
    from orchestrator.run_dirs.other_registry import refuse_other_registry
    from orchestrator.run_dirs.run_folder import check_run_folder

    if never_submitted(attempts) and run.state in LIVE_RUNS:
        return
    folder = existing_folder(run.name, run.run_dir)
    if not never_submitted(attempts) and (why := check_run_folder(run, attempts[0])):
        alternative = f"or begin a new run: `orch submit --from {folder.checkpoints}/STEP`"
        what = f"{why}; nothing shows that the folder there belongs to {run.name}"
        raise Precondition(what, where=str(folder.path), hint=f"{PUT_BACK}; {alternative}")
    refuse_other_registry(run, attempts, registry)


def _refuse_live(store: Any, run: Run, change: ResumeOptions | None) -> None:
    """Raise Precondition for a live run that is being cancelled, or whose configuration would change."""
    from orchestrator.controller.user_requests import pending_cancels

    if run.name in pending_cancels(store):
        hint = f"`orch wait {run.name}` returns when it has stopped; then run this again"
        raise Precondition(f"{run.name} is being cancelled", where=run.reason, hint=hint)
    if change is not None and change.overrides:
        what = f"{run.name} is {run.state}: its configuration can change only while it has no live job"
        hint = f"`orch cancel {run.name}` stops it; then run this again"
        raise Precondition(what, where=" ".join(change.overrides), hint=hint)


def _may_have_job(attempts: list[Attempt]) -> bool:
    from orchestrator.controller.ownership import never_submitted

    return attempts[-1].state in LIVE_ATTEMPTS and not never_submitted(attempts)


def _key_here(kind: str, *, must: bool) -> str:
    """Return the key of the scheduler that this host reaches.

    If the scheduler does not answer, raise SlurmUnreachable if `must`; otherwise return "".
    """
    from orchestrator.scheduler.available_schedulers import make_instance

    found = make_instance(kind)
    key = found()
    if must and not key:
        raise SlurmUnreachable(
            f"it is not known which cluster this is: {found.silence}",
            hint="run the same command in a shell where `sinfo` answers",
        )
    return key


def await_answers(screen: Screen, store: Any, requests: list[PendingRequest], no_controller: bool) -> None:
    """Fill in the controller's answers and the runs' states. Return without them after ANSWER_TIMEOUT.

    After QUIET seconds, show what the command is waiting for.
    """
    began = time.monotonic()
    with screen.ticker() as ticker:
        while not _record_answers(store, requests):
            waited = time.monotonic() - began
            if no_controller or waited >= ANSWER_TIMEOUT:
                return
            if waited >= QUIET:
                names = ", ".join(item.node or item.run for item in requests if not item.answer)
                ticker.update(f"requested; waiting for the controller's answer about {names}")
            time.sleep(0.2)


def _record_answers(store: Any, requests: list[PendingRequest]) -> bool:
    """Record the available answers in the requests; return whether all requests are answered."""
    if not all(item.answer for item in requests):
        answers = {each.id: each for each in store.user_requests(pending=False) if each.answered_at is not None}
        for item in requests:
            if item.id in answers:
                item.answer = answers[item.id].answer or "done"
                item.state = store.run(item.run).state
    return all(item.answer for item in requests)


def _print_answers(screen: Screen, verb: str, requests: list[PendingRequest]) -> None:
    if screen.json:
        screen.data(verb, [{"run": item.run, "state": str(item.state), "answer": item.answer} for item in requests])
        return
    for item in requests:
        where = item.where
        of = f" of {where.scheduler}" if where.scheduler and (where.lives or not where.reached) else ""
        answer = item.answer or f"requested; the controller{of} has not answered yet"
        screen.say(answer if answer.startswith(item.run) else f"{item.run}: {answer} ({item.state})")
        screen.note(f"  see:  orch status {item.run}")
