"""`orch priority`: the order of a user's own waiting runs."""

import time

import click

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import locate_run
from orchestrator.cli.runs.cancel_resume import NO_CONTROLLER, PendingRequest, serve_requests
from orchestrator.cli.terminal.argument_types import PRIORITIES, Priority
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import NotFound, Precondition, SlurmUnreachable
from orchestrator.states import ENDED_RUNS


def priority_words(value: int) -> str:
    """Return `high` for 10, or the number."""
    return next((word for word, number in PRIORITIES.items() if number == value), str(value))


@click.command(
    cls=Verb, json_data="{run, priority, answer}", context_settings={"ignore_unknown_options": True}
)  # so that -10 is a number
@click.argument("run")
@click.argument("value", metavar="high|normal|low|N", type=Priority())
@NO_CONTROLLER
@click.pass_obj
def priority(screen: Screen, run: str, value: int, no_controller: bool) -> int:
    """Change the order of your own waiting runs: those with a higher priority start first.

    high is 10, normal 0, low -10; N is a whole number from -1000 to 1000. Only your own runs in the same partition
    change places: Slurm lets users lower a job's priority only, so a run with a lower priority gets just enough `nice`
    to come after the others, and loses it when none of them waits any more. A running job is not affected; the run's
    next attempts are. The exit code is 4 if the run is over.
    """
    with open_store() as store:
        found = store.run(run)
        if run not in (found.name, "@last"):
            raise NotFound(f"no run {run}", hint=f"priority needs the full name; is it {found.name}?")
        if found.state in ENDED_RUNS:
            what = f"{found.name} is {found.state}: it has no job that could wait"
            raise Precondition(what, where=found.reason, hint=f"`orch show {found.name}` shows what happened")
        where = locate_run(found.name, found.cluster, found.scheduler)
        asked = store.add_user_request(found.name, "priority", {"value": value}, now=time.time())
        item = PendingRequest(run=found.name, state=found.state, kind=found.cluster, where=where, id=asked)
        unanswered = serve_requests(screen, store, [item], no_controller=no_controller)
    text = item.answer or f"{found.name}: requested; the controller has not answered yet"
    screen.answer("priority", {"run": found.name, "priority": value, "answer": item.answer}, text)
    if not item.answer:
        where.require_answer()
    return SlurmUnreachable.exit_code if unanswered else 0
