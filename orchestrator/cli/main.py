"""The `orch` program: which module holds which verb, and the edge where errors become exit codes."""

import os
import re
import sys
import traceback
from collections.abc import Sequence

import click

from orchestrator.cli.terminal.command_classes import LazyGroup
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import NotFound, OrchError, Precondition

VERBS = {
    "submit": ("orchestrator.cli.runs.submit:submit", "Submit a run and let it finish, whatever dies in between."),
    "status": ("orchestrator.cli.runs.status:status", "The newest runs: state, step, loss, last checkpoint, why."),
    "show": ("orchestrator.cli.runs.show:show", "One run in full: attempts, decisions, checkpoints, identity."),
    "wait": ("orchestrator.cli.runs.wait:wait", "Wait until a run ends; the exit code says how."),
    "logs": ("orchestrator.cli.live_jobs.logs:logs", "What ranks, agents and the controller printed."),
    "top": (
        "orchestrator.cli.live_jobs.top:top",
        "A live run at a glance: step, tokens/s, loss, where every rank stands.",
    ),
    "attach": (
        "orchestrator.cli.live_jobs.attach:attach",
        "Look inside a live job: where every thread of its ranks stands.",
    ),
    "save": ("orchestrator.cli.live_jobs.save:save", "Save a checkpoint now; training goes on."),
    "cancel": ("orchestrator.cli.runs.cancel_resume:cancel", "Save a checkpoint, then stop the runs for good."),
    "resume": ("orchestrator.cli.runs.cancel_resume:resume", "Go on with a run that is held, failed or cancelled."),
    "ckpt": (
        "orchestrator.cli.checkpoints.group:ckpt",
        "Checkpoints: list, verify, compare, export, import, pin, clean up.",
    ),
    "nodes": ("orchestrator.cli.cluster.nodes:nodes", "Nodes that runs have used, and those kept away from."),
    "config": ("orchestrator.cli.config:config", "Configurations: show with origins, validate, compare."),
    "data": ("orchestrator.cli.data:data", "Training data: turn text into token shards."),
    "db": ("orchestrator.cli.db:db", "The registry: where it is, back it up, rebuild it."),
    "controller": ("orchestrator.cli.cluster.controller:controller", "The process that keeps runs going."),
    "doctor": ("orchestrator.cli.cluster.doctor:doctor", "What works on this machine and cluster, and what to mend."),
    "drill": ("orchestrator.cli.drills.drill:drill", "Bring a fault about on purpose, and score what came of it."),
    "demo": ("orchestrator.cli.drills.demo:demo", "A small run on this machine that is killed and recovers."),
}


@click.group(
    cls=LazyGroup,
    table=VERBS,
    invoke_without_command=True,
    epilog="`orch` alone lists what runs and what needs you. `orch VERB -h` explains a verb.",
)
@click.pass_context
def orch(context: click.Context) -> None:
    """A fault-tolerant training orchestrator for Slurm clusters."""
    if context.invoked_subcommand is None:
        from orchestrator.cli.runs.status import overview  # the verb's module is loaded only when it is used

        overview(context.find_object(Screen) or Screen())


def verbs() -> list[str]:
    """Every verb as it is typed: `submit`, `ckpt ls`."""
    context = click.Context(orch)
    found = []
    for name in orch.list_commands(context):
        command = orch.get_command(context, name)
        inner = command.list_commands(context) if isinstance(command, click.Group) else [""]
        found += [f"{name} {word}".strip() for word in inner]
    return found


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code, after telling a person or a program what went wrong."""
    words = list(sys.argv[1:] if args is None else args)
    screen = Screen()
    screen.json = "--json" in words  # known before parsing, so that a parsing error is JSON too
    screen.debug = "--debug" in words
    try:
        result = orch.main(words, prog_name="orch", obj=screen, standalone_mode=False)
        screen.flush()
    except OrchError as error:
        return _report_error(screen, error)
    except click.exceptions.NoArgsIsHelpError as error:
        screen.note(error.ctx.get_help() if error.ctx else error.format_message())
        return 2
    except click.ClickException as error:
        return _usage(screen, error)
    except (click.Abort, KeyboardInterrupt):
        screen.note("detached: nothing was stopped")
        return 130
    except BrokenPipeError:
        # The reader (`| head`) went away: nothing more can be said, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _report_error(
            screen, Precondition(*_os_words(error), hint="mend that, then type the same command again")
        )
    except Exception as error:  # outermost edge: recorded, and told  # noqa: BLE001
        return _internal(screen, error, words)
    return result if isinstance(result, int) else 0


def _report_error(screen: Screen, error: OrchError) -> int:
    if screen.debug:
        screen.note(traceback.format_exc())
    screen.error(type(error).__name__, error.what, error.where, error.hint)
    return error.exit_code


def _os_words(error: OSError) -> tuple[str]:
    name = f": {error.filename}" if error.filename else ""
    return (f"{error.strerror or error}{name}",)


def _usage(screen: Screen, error: click.ClickException) -> int:
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else "orch"
    code = "NotFound" if isinstance(error, click.FileError) else "Usage"
    screen.error(
        code, " ".join(error.format_message().split()).rstrip("."), f"command line: {path}", f"see `{path} -h`"
    )
    return NotFound.exit_code if code == "NotFound" else 2


def redacted(words: Sequence[str]) -> str:
    """A command line as it may be kept: what is secret stands in values of `env`, and in URLs."""
    from checkpointing.storage.backends import without_secrets

    return without_secrets(" ".join(re.sub(r"(?s)^(\+?env(?:\.[^=]*)?=).*", r"\1***", word) for word in words))


def _internal(screen: Screen, error: Exception, words: Sequence[str]) -> int:
    from orchestrator.home import state_home

    text = traceback.format_exc()
    where = ""
    try:
        saved = state_home() / "last-error.txt"
        descriptor = os.open(saved, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", errors="backslashreplace") as stream:
            os.fchmod(descriptor, 0o600)  # one that was there keeps its mode
            stream.write(f"orch {redacted(words)}\n\n{text}")
        where = f"the traceback is in {saved}"
    except OSError:
        where = "the traceback could not be saved; --debug prints it"
    if screen.debug:
        screen.note(text)
    what = f"internal error: {type(error).__name__}: {error}"
    screen.error("Internal", what, where, "this is a defect in orch; please report it with that file")
    return 1


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `orch` program."""
    sys.exit(run(args))


if __name__ == "__main__":
    main()
