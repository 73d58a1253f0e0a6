"""`orch wait`: until a run has ended."""

import click

from orchestrator.cli.runs.follow import end_error, wait_until_end
from orchestrator.cli.runs.status import one_row, public
from orchestrator.cli.terminal.argument_types import Seconds
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, progress


@click.command(cls=Verb)
@click.argument("run")
@click.option("--timeout", type=Seconds(min=0), default=None, metavar="SECONDS", help="Give up after so long.")
@click.option("--follow", is_flag=True, help="Print events and decisions as they happen.")
@click.pass_obj
def wait(screen: Screen, run: str, timeout: float | None, follow: bool) -> int:
    """Wait until a run ends; the exit code says how.

    0 succeeded, 8 failed or held (with the reason and what to type), 10 cancelled, 124 timeout, 130 detached by
    Ctrl-C. If no controller is alive, this command does its work.
    """
    row = wait_until_end(screen, one_row(run)["run"], timeout=timeout, follow=follow)
    trouble = end_error(row)
    if screen.json:
        screen.data("wait", public([row])[0])
        return trouble.exit_code if trouble else 0
    if trouble:
        raise trouble
    screen.say(f"{row['run']} succeeded: step {progress(row['step'], row['total_steps'], ' of ')}")
    return 0
