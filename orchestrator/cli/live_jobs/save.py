"""`orch save`: saves a checkpoint now, without stopping the training."""

import re

import click

from orchestrator.cli.live_jobs.live_attempt import (
    await_answer,
    find_live_attempt,
)
from orchestrator.cli.terminal.argument_types import timeout_option
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.interrupts import interrupts_held
from trainer.protocol.requests import RequestKind

_SAVED = re.compile(r"^saved at step (\d+)")


@click.command(cls=Verb, json_data="{run, attempt, answer, step}")
@click.argument("run")
@click.option("--wait/--no-wait", "wait_", default=True, help="Wait until the checkpoint is committed (default).")
@timeout_option(600.0)
@click.pass_obj
def save(screen: Screen, run: str, wait_: bool, timeout: float) -> None:
    """Save a checkpoint now, at the next step boundary; training continues.

    A save that is already under way does not count. The request survives restarts within the attempt, and stands
    after a timeout (exit code 124). The exit code is 4 if nothing runs, or if the ranks are a `command:` of yours.
    """
    screen.if_interrupted = lambda: "interrupted: nothing was asked for"
    found = find_live_attempt(run)
    stands = f"interrupted: the request stands, and {found.run} saves at its next step boundary"
    with interrupts_held():
        request = found.send_request(RequestKind.SAVE, "orch save")
        screen.if_interrupted = lambda: stands
    answer = await_answer(found, request, timeout) if wait_ else None
    said = _SAVED.match(answer or "")
    if screen.json:
        step = int(said[1]) if said else None
        screen.data("save", {"run": found.run, "attempt": found.attempt_dir.number, "answer": answer, "step": step})
        return
    if answer is None:
        screen.say(f"{found.run}: asked to save; training goes on")
        screen.note(f"  look:  orch ckpt ls {found.run}")
        return
    screen.say(f"{found.run}: {answer}")
