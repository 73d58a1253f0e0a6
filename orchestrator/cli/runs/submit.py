"""`orch submit`: from a configuration to a queued job and its controller."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.access.registry import act_as_controller, open_store
from orchestrator.cli.access.run_folder import START, TAKE_OVER, controller_state
from orchestrator.cli.access.slurm_environment import compare_with_controller, silence_reason, unset_words
from orchestrator.cli.config import OVERRIDES, compose_config, print_config, warn_about_config
from orchestrator.cli.runs.events import detach_message, report_end, wait_until_end
from orchestrator.cli.runs.tags import check_tags
from orchestrator.cli.terminal.argument_types import ClusterKind, NonEmptyPath, Priority
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.config.redaction import redact_config, redacted_origins
from orchestrator.errors import ConfigError, Precondition, SlurmUnreachable, SubmitRejected
from orchestrator.home import registry_path
from orchestrator.registry.records import Attempt, Run
from orchestrator.run_view import RunView, find_run, runs_by_name
from orchestrator.scheduler.available_schedulers import FACTORIES
from orchestrator.states import RunState

if TYPE_CHECKING:
    from orchestrator.submission.create_run import RunOrigin
    from trainer.protocol.user_code.code_record import CodeRecord

JOB_WITHIN = 30.0
"""Seconds that submit waits for the job id. The controller keeps trying afterwards."""
TAKEN_OVER_WITHIN = 75.0
"""Additional seconds to wait if the controller stalls. Its lease lasts a minute; then a successor launches the job."""
JOB_WITHIN_ALONE = 150.0
"""Seconds to wait without a controller. After an unanswered sbatch, the job is looked up for 60 s before a retry."""
LOOK_EVERY = 0.1
CHECK_CONTROLLER_EVERY = 3.0
"""Seconds between submit's checks that a controller is alive."""


SUBMIT_JSON = """
{run, attempt, job_id, cluster, run_dir, config_digest, tags, after}; job_id is null if there is none yet; with --wait
also state, step, reason
"""


@click.command(cls=Verb, json_data=SUBMIT_JSON)
@click.argument("source", metavar="CONFIG", required=False)
@OVERRIDES
@click.option(
    "--from", "begin", metavar="RUN@STEP",
    help="Start from this checkpoint of another run: weights, optimizer, random generators, position in the data. "
    "CONFIG defaults to that run's configuration; without changes, training computes the same bits.",
)  # fmt: skip
@click.option(
    "--weights-only", is_flag=True,
    help="With --from: take only the weights; begin at step 0 and at the start of the data, with a fresh optimizer.",
)  # fmt: skip
@click.option(
    "--from-sbatch", metavar="SCRIPT", type=NonEmptyPath(path_type=Path),
    help="Make the configuration from this sbatch script, show it, write it beside the script, and ask.",
)  # fmt: skip
@click.option("--print-config", is_flag=True, help="With --from-sbatch: print the configuration; write nothing.")
@click.option("-y", "--yes", is_flag=True, help="With --from-sbatch: submit without asking.")
@click.option("--after", metavar="RUN", help="Start when this run has succeeded; if it fails or is cancelled, hold.")
@click.option("-t", "--tag", "tags", multiple=True, metavar="NAME", help="Tag the run; repeatable.")
@click.option(
    "--priority", type=Priority(), metavar="high|normal|low|N", default="normal", show_default=True,
    help="Order among your own waiting runs; `orch priority` changes it.",
)  # fmt: skip
@click.option("-n", "--name", help="Name of the run; orch adds a number.")
@click.option("--cluster", type=ClusterKind(), help="Where to run; overrides cluster.kind.")
@click.option("--wait", "wait_", is_flag=True, help="Return when the run has ended.")
@click.option("--follow", is_flag=True, help="Like --wait, and also print events and a progress line.")
@click.option(
    "--no-controller", is_flag=True,
    help="Do not start a controller: launch from here and return. Restarts need `orch wait` or a controller.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True,
    help="Print the configuration with origins and the sbatch script, and check the job with Slurm; submit nothing.",
)  # fmt: skip
@click.option("--print-sbatch", is_flag=True, help="Print the sbatch script; write and submit nothing.")
@click.pass_obj
def submit(
    screen: Screen, source: str | None, overrides: tuple[str, ...], begin: str | None, weights_only: bool,
    after: str | None, tags: tuple[str, ...], priority: int, name: str | None, cluster: str | None, wait_: bool,
    follow: bool, no_controller: bool, dry_run: bool, print_sbatch: bool, from_sbatch: Path | None,
    print_config: bool, yes: bool,
) -> int:  # fmt: skip
    """Submit a run; orch restarts it until it is finished.

    CONFIG is a preset (`tiny-gpt`) or a YAML file. KEY=VALUE overrides a value, +KEY=VALUE adds one to an open map
    (`env`, `workload.args`, `cluster.sbatch`), ~KEY restores the default. The command starts a controller if none
    is alive, and waits up to 30 seconds for the job id.

    Before it records the run, it imports your workload (60 seconds at most), writes a small object to every tier,
    and asks Slurm (`sbatch --test-only`). If a check fails, the error says what to change. Do not put secrets into
    `env`: `env_from=[HF_TOKEN]` takes them from this shell (docs/security.md).

    Ctrl-C before the run is recorded leaves nothing behind; afterwards the run continues. With --wait or --follow,
    the exit code is the run's: 8 failed or held, 10 cancelled.
    """
    from orchestrator.config.layers import is_override  # imports yaml, needed only to read configurations
    from orchestrator.submission.create_run import RunOrigin

    screen.if_interrupted = lambda: "interrupted: no run was created"
    tags = check_tags(tags)
    if source is not None and is_override(source) and not Path(source).exists():
        overrides, source = (source, *overrides), None
    if cluster is not None:
        overrides = (*overrides, f"cluster.kind={cluster}")
    if name is not None:  # checked like the key `name`; YAML can read JSON's quotes
        overrides = (*overrides, f"name={json.dumps(name, ensure_ascii=False)}")
    if weights_only and begin is None:
        raise ConfigError("--weights-only needs a checkpoint", where="command line", hint="add --from RUN@STEP")
    only_look = dry_run or print_sbatch
    before = find_predecessor(after) if after is not None else {}
    if from_sbatch is None:
        _refuse_sbatch_options(print_config=print_config, yes=yes)
    else:
        _refuse_second_source(source, begin)
        from orchestrator.cli.runs.from_sbatch import make_config  # only for this option

        made = make_config(screen, from_sbatch, overrides, only_print=print_config, yes=yes, ask=not only_look)
        if made is None:
            return 0
        source = str(made.absolute())
    beginning = _beginning(screen, source, overrides, begin, weights_only=weights_only, write=not only_look)
    with beginning as (composed, imported):
        warn_about_config(screen, composed.config)
        if only_look:
            preview(screen, composed, cluster, only_script=print_sbatch and not dry_run)
            return 0
        origin = RunOrigin(imported=imported, tags=tags, priority=priority, **before)
        launched = launch(screen, composed, cluster, no_controller=no_controller, origin=origin)
    if not (screen.json and (wait_ or follow)):
        _print_launched(screen, launched)
    if not (wait_ or follow):
        return 0
    view = wait_until_end(screen, launched["run"], follow=follow)
    if screen.json:
        screen.data("submit", {**launched, "state": view.state, "step": view.step, "reason": view.reason})
    return report_end(screen, view)


def _refuse_sbatch_options(*, print_config: bool, yes: bool) -> None:
    """Raise ConfigError for options that need --from-sbatch."""
    if print_config or yes:
        what = f"{'--print-config' if print_config else '-y'} is only for --from-sbatch"
        raise ConfigError(what, where="command line", hint="leave it out, or add --from-sbatch SCRIPT")


def _refuse_second_source(source: str | None, begin: str | None) -> None:
    """Raise ConfigError for a configuration besides the one that --from-sbatch makes."""
    if source is not None or begin is not None:
        other = source if source is not None else f"--from {begin}"
        hint = f"leave out {other}, or submit the configuration: --print-config prints it"
        raise ConfigError("--from-sbatch makes the configuration itself", where="command line", hint=hint)


@contextmanager
def _beginning(
    screen: Screen, source: str | None, overrides: tuple[str, ...], begin: str | None, *, weights_only: bool,
    write: bool,
) -> Iterator[tuple[Any, dict[str, Any] | None]]:  # fmt: skip
    """Yield the run's config and its initial checkpoint, which exists inside the block if `write`."""
    if begin is not None:
        from orchestrator.cli.runs.branch import branch, branch_weights  # imports sqlalchemy, omegaconf

        if weights_only:
            with branch_weights(screen, begin, source, overrides, write=write) as found:
                yield found
        else:
            with branch(screen, begin, source, overrides) as found:
                yield found
        return
    if source is None:
        raise ConfigError("CONFIG is missing", hint="`orch submit tiny-gpt`, or `orch submit FILE.yaml`")
    composed = compose_config(source, overrides)
    if not write:
        from orchestrator.submission import user_code  # imports ast; a real submit checks it later

        user_code.check(composed.config)
    yield composed, None


def find_predecessor(name: str) -> dict[str, Any]:
    """Return the fields of `RunOrigin` for a start after this run. Raises Precondition if it would never come."""
    view = find_run(name)
    if view.state in (RunState.FAILED, RunState.CANCELLED) or view.removal:
        what = f"--after {view.run}: it is {'being removed' if view.removal else view.state}, so nothing would start"
        raise Precondition(what, where=view.reason, hint=view.after_end)
    return {"predecessor": view.run, "predecessor_created_at": view.created_at}


def launch(
    screen: Screen, composed: Any, cluster: str | None, *, no_controller: bool, origin: "RunOrigin | None" = None
) -> dict[str, Any]:
    """Record the run, ensure that a controller launches it, and wait for its job; return the data of `orch submit`.

    A run that waits for another one has no job yet.
    """
    from orchestrator.scheduler.available_schedulers import resolve
    from orchestrator.submission.create_run import RunOrigin

    kind = resolve(cluster or composed.config.cluster.kind)
    if not no_controller:
        compare_with_controller(screen, kind)
    code = check(screen, composed, kind)
    run, attempt = record(screen, composed, cluster, replace(origin or RunOrigin(), code=code))
    if not no_controller:
        start_controller(run)
    view = find_run(run.name)
    waits = bool(run.predecessor) and {one.state for one in runs_by_name([run.predecessor])} != {RunState.SUCCEEDED}
    if not waits:
        view, silent = _await_job(screen, run.name, run.cluster, no_controller=no_controller)
        if view.job_id is None:
            _explain_missing_job(screen, run, view, silent)
    return {
        "run": run.name, "attempt": attempt.number, "job_id": view.job_id, "cluster": run.cluster,
        "run_dir": run.run_dir, "config_digest": run.config_digest, "tags": list(run.tags),
        "after": run.predecessor or None,
    }  # fmt: skip


def check(screen: Screen, composed: Any, kind: str) -> "CodeRecord | None":
    """Check code, tiers and job before a run is recorded; return the imported code. Raises an OrchError."""
    from orchestrator.submission import create_run, user_code

    screen.if_interrupted = lambda: "interrupted: no run was created"
    user_code.check(composed.config)
    tiers = create_run.checking_tiers(composed.config, os.environ)
    with user_code.inspecting(composed.config, kind, os.environ) as finish_import, tiers as finish_tiers:
        _ask_slurm(screen, composed, kind)
        finish_tiers(screen.note)
        return finish_import(screen.note, lambda words: screen.warn("workload_import", words))


def record(screen: Screen, composed: Any, cluster: str | None, origin: "RunOrigin") -> "tuple[Run, Attempt]":
    """Prepare the data and record a run that `check` has accepted."""
    from orchestrator.submission.check_budgets import check_budgets
    from orchestrator.submission.create_run import create_run

    check_budgets(composed.config, origin.tags, registry_path(), time.time(), lambda text: screen.warn("budget", text))

    def set_interrupt_message(run: Run) -> None:
        screen.if_interrupted = lambda: detach_message(run.name)

    with open_store(create=True) as store, screen.bar("tokenizing") as meter:
        return create_run(
            store, composed, cluster=cluster, now=time.time(), progress=meter, on_recorded=set_interrupt_message,
            origin=origin,
        )  # fmt: skip


def start_controller(run: Run) -> None:
    from orchestrator.controller import service

    try:
        service.ensure_running(registry_path(), run.cluster)
    except OSError as error:
        what = f"{run.name} is recorded, but no controller can be started: {error.strerror}"
        raise Precondition(what, where=run.run_dir, hint=f"do not submit it again; {START}") from error


def _explain_missing_job(screen: Screen, run: Run, view: RunView, silent: tuple[str, ...]) -> None:
    """Warn about a run without a job, or raise if no controller will submit one."""
    if view.state in (RunState.HELD, RunState.FAILED):
        assert view.end_error is not None
        raise view.end_error
    if run.cluster in silent:
        what = f"{run.cluster} does not answer: {run.name} is recorded, but it is unknown whether it has a job"
        hint = f"{START}, which continues with it: do not submit it again"
        raise SlurmUnreachable(what, where=run.run_dir, hint=hint)
    if not (state := controller_state(run.scheduler)).alive:
        what = f"{run.name} is recorded, but no controller runs it: {state.reason}"
        hint = f"do not submit it again; {TAKE_OVER if state.stalled else START}"
        raise Precondition(what, where=run.run_dir, hint=hint)
    screen.warn("no_job_yet", _no_job_yet(view))


def _ask_slurm(screen: Screen, composed: Any, kind: str) -> None:
    """Raise SubmitRejected for a job that Slurm would refuse, before creating a run that could only be held."""
    from orchestrator.scheduler.available_schedulers import kinds
    from orchestrator.submission.create_run import check_script, check_with_scheduler

    if kind in kinds():
        check_script(composed.config, kind)
        check_with_scheduler(composed.config, kind, lambda words: screen.warn("slurm_refuses_now", words))


def _no_job_yet(view: RunView) -> str:
    from orchestrator.registry import fast_queries

    why = view.reason or silence_reason(fast_queries.lease(registry_path(), view.scheduler or None))
    unset = "" if view.scheduler else unset_words(view.cluster)
    return f"no job yet{f': {why}' if why else ''}{unset}; the controller keeps trying: orch status {view.run}"


def _await_job(screen: Screen, run: str, kind: str, *, no_controller: bool) -> tuple[RunView, tuple[str, ...]]:
    """Return the run once it has a job or has ended, or after the timeout.

    Also returns the schedulers that did not answer this process's last pass.
    """
    from orchestrator.controller import service
    from orchestrator.registry import fast_queries  # imports sqlite3, which `orch --help` does not need

    now = time.monotonic()
    deadline, check_at = now + (JOB_WITHIN_ALONE if no_controller else JOB_WITHIN), now + CHECK_CONTROLLER_EVERY
    key = find_run(run).scheduler or None
    latest, before = deadline + TAKEN_OVER_WITHIN, fast_queries.lease(registry_path(), key)
    silent: tuple[str, ...] = ()
    while True:
        if no_controller:
            silent = act_as_controller(screen, kind, silent)
        view = find_run(run)
        if view.job_id is not None or view.is_over:
            return view, silent
        now = time.monotonic()
        # If the lease is not renewed, its holder has stalled, and a successor waits until the lease expires.
        if now >= deadline and (no_controller or now >= latest or fast_queries.lease(registry_path(), key) != before):
            return view, silent
        if not no_controller and now >= check_at:
            service.ensure_running(registry_path(), kind)  # the earlier controller may have run only one pass
            check_at = now + CHECK_CONTROLLER_EVERY
        time.sleep(LOOK_EVERY if not no_controller else 1.0)


def _print_launched(screen: Screen, launched: dict[str, Any]) -> None:
    run, digest = launched["run"], launched["config_digest"][:12]
    job = f"job {launched['job_id']}" if launched["job_id"] else "no job yet"
    job = f"starts after {launched['after']}" if launched["after"] and not launched["job_id"] else job
    note = f"  status   orch status {run}\n  logs     orch logs {run} -f\n  wait     orch wait {run} --follow\n"
    note += f"  cancel   orch cancel {run}\n  folder   {launched['run_dir']}"
    screen.answer("submit", launched, f"{run} submitted ({launched['cluster']}, {job}, config {digest})", note=note)


def preview(screen: Screen, composed: Any, cluster: str | None, *, only_script: bool) -> None:
    """Print the resolved config with origins and the sbatch script. Writes nothing."""
    from orchestrator.scheduler.available_schedulers import kinds, resolve
    from orchestrator.submission.create_run import first_job
    from orchestrator.submission.secret_values import separate_secrets  # imports omegaconf

    separate_secrets(composed, os.environ)  # refuses what a submit would refuse
    kind = resolve(cluster or composed.config.cluster.kind)
    if kind not in kinds():  # its script can be previewed anyway
        screen.warn("no_slurm", "there is no Slurm on this machine: submitting from here would be refused")
    make_script = FACTORIES[kind].script
    # The script of the first attempt, with placeholders for the run's number and nonce.
    script = make_script(first_job(composed.config, kind)) if make_script is not None else None
    try:
        _ask_slurm(screen, composed, kind)
    except SubmitRejected as error:
        screen.warn("slurm_refuses", f"{error.what}; {error.hint}")
    if screen.json:
        answer = {"cluster": kind, "config_digest": composed.digest, "config": redact_config(composed.data)}
        screen.data("submit.preview", {**answer, "origins": redacted_origins(composed.origins), "sbatch": script})
        return
    if not only_script:
        print_config(screen, composed.data, composed.origins)
        screen.say(f"\n# config digest {composed.digest}\n# cluster {kind}\n")
    for line in (script or f"# {kind}: no sbatch script; the agents are processes on this machine").splitlines():
        screen.raw(line)
    screen.note("nothing was submitted")
