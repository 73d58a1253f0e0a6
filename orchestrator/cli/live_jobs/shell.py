"""`orch shell`: a shell or a command on a node of a live job, with the environment of its ranks."""

import os
import shutil
import sys

import click

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import existing_folder, reaches, where_to_type
from orchestrator.cli.live_jobs.live_attempt import require_rank_and_node
from orchestrator.cli.runs.node_setup import read_node_variables
from orchestrator.cli.runs.run_reader import newest_heartbeat
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, Precondition
from orchestrator.registry.records import Attempt
from orchestrator.run_view import RunView, find_run
from orchestrator.states import AttemptState
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.rank_variables import rank_caches
from trainer.protocol.run_dir import AttemptDir


@click.command(cls=Verb)
@click.argument("run")
@click.argument("command", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--node", type=click.IntRange(0), metavar="N", help="The N-th node, counting from 0 (default: 0).")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="The node of this rank.")
@click.pass_obj
def shell(screen: Screen, run: str, command: tuple[str, ...], node: int | None, rank: int | None) -> None:
    """Open a shell on a node of a live job, or run a command there.

    It has the environment of the run's ranks: templates, `env`, secrets, working folder, container, staged archive and
    caches; without --rank, the compiler caches of the node's first rank. On Slurm it is an additional step of the job
    (`srun --overlap`), which ends with the job; pyxis creates a second container from the same image. The exit code is
    the command's: `orch shell RUN --rank 3 -- nvidia-smi`. If stdin is not a terminal, the shell reads its commands
    from it.
    """
    refuse_json(screen, "orch shell")
    if rank is not None and node is not None:
        raise ConfigError("--rank and --node are mutually exclusive", where="command line", hint="pass one of them")
    found = find_run(run)
    _require_job(found)
    _enter(screen, found, command, node, rank)


def refuse_json(screen: Screen, verb: str) -> None:
    """Raise ConfigError for --json: the output is that of a shell."""
    if screen.json:
        what = f"--json prints one object, but the output of `{verb}` is the command's own"
        raise ConfigError(what, where=f"command line: {verb}", hint="omit --json; the exit code is the command's too")


def _require_job(view: RunView) -> None:
    """Raise Precondition if the run has no running job, or if this host cannot reach it."""
    if view.is_over:
        raise Precondition(f"{view.run} is {view.state}: it has no job", where=view.reason, hint=view.after_end)
    if not reaches(view.cluster, view.scheduler):
        what = f"the job of {view.run} is on {view.scheduler}, which this host cannot reach"
        raise Precondition(what, hint=f"type `orch shell {view.run}` {where_to_type(view.scheduler)}")


def _enter(screen: Screen, view: RunView, command: tuple[str, ...], node: int | None, rank: int | None) -> None:
    """Replace this process by the command on the chosen node."""
    # sqlalchemy and jinja2: only once the run has a job
    from orchestrator.run_dirs.controlled_run import RunConfigs
    from orchestrator.run_dirs.job_spec import job_spec
    from orchestrator.scheduler import interactive

    with open_store(readonly=True) as store:
        run, attempt = store.run(view.run), store.attempts(view.run)[-1]
        config = RunConfigs(store)(attempt.config_digest or run.config_digest)
    if attempt.state is not AttemptState.RUNNING or attempt.job_id is None:
        job = f"job {attempt.job_id} is {attempt.job_state}" if attempt.job_id else "it has no job yet"
        what = f"{run.name} is {run.state}: {job}"
        raise Precondition(what, where=view.reason, hint=f"wait until it runs:  orch status {run.name} -w")
    require_rank_and_node(config.cluster, rank, node)
    folder = existing_folder(run.name, run.run_dir)
    spec, chosen = job_spec(run, attempt, config), command or interactive.shell_command(run.name)
    environ = interactive.run_environment(spec, config, folder, attempt.number, os.environ)
    place = interactive.working_folder(run.identity, folder, config)
    rank = (node or 0) * config.cluster.ranks_per_node if rank is None else rank
    attempt_dir, simulated = folder.attempt(attempt.number), traits(run.cluster).simulated_nodes
    is_prepared = bool(config.cluster.stage.archive or config.cluster.caches)
    name = ""  # a local shell without preparation needs none
    if is_prepared or not simulated:
        name = _node_name(run.name, attempt, attempt_dir, rank // config.cluster.ranks_per_node)
    if is_prepared:
        variables = _rank_variables(attempt_dir, name, rank, config, simulated=simulated)
        if not variables:
            screen.note(f"{name} is not prepared yet: the variables of its archive and caches are not set")
        chosen = interactive.with_node_variables(chosen, variables, config.env)
    if simulated:
        words = interactive.local_words(spec, chosen)
    else:
        words = interactive.step_words(
            spec, chosen, place=[f"--jobid={attempt.job_id}", f"--nodelist={name}"], folder=str(place),
            terminal=is_interactive(),
        )  # fmt: skip
    replace_process(words, environ, str(place))


def _rank_variables(attempt: AttemptDir, node: str, rank: int, config: RunConfig, *, simulated: bool) -> dict[str, str]:
    """Return the variables that the preparation of its node has set for a rank; none while that has not ended."""
    variables = read_node_variables(attempt, node)
    on_machine = rank if simulated else rank % config.cluster.ranks_per_node
    return variables | rank_caches(on_machine, {**variables, **config.env})


def _node_name(run: str, attempt: Attempt, attempt_dir: AttemptDir, index: int) -> str:
    """Return the name of the job's N-th node. Raises Precondition if that node is no longer part of the job."""
    heartbeat = newest_heartbeat(attempt_dir)
    names = heartbeat.nodes if heartbeat is not None and heartbeat.nodes else attempt.nodes
    if index >= len(names):
        what = f"the job of {run} has no node {index}, its nodes are {', '.join(names) or 'not known yet'}"
        raise Precondition(what, where="command line", hint=f"orch show {run}")
    return names[index]


def is_interactive() -> bool:
    """Return whether a user types at a terminal and reads there."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def replace_process(words: tuple[str, ...], environ: dict[str, str], folder: str) -> None:
    """Replace this process by a command, so that the terminal, signals and exit code are the command's own.

    Raises Precondition if the program is missing here, or OSError.
    """
    if shutil.which(words[0], path=environ.get("PATH")) is None:
        hint = "type it on a login node, or load Slurm's module"
        raise Precondition(f"{words[0]} is not found on this machine", where="PATH", hint=hint)
    if os.path.isdir(folder):  # a node may have it even if this machine does not
        os.chdir(folder)
    sys.stdout.flush()
    os.execvpe(words[0], words, environ)  # noqa: S606  # the user's own command
