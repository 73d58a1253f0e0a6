"""The `orch` program: the table of verbs and their modules, and the edge at which errors become exit codes."""

import itertools
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from orchestrator.cli.terminal.command_classes import LazyGroup
from orchestrator.cli.terminal.render import Screen
from orchestrator.cli.terminal.streams import READER_GONE, OutputLost, ReaderGone, find_remedy, prepare
from orchestrator.errors import ConfigError, NotFound, OrchError, Precondition

VERBS = {
    "submit": ("runs.submit:submit", "Submit a run; orch restarts it until it is finished."),
    "sweep": ("runs.sweep:sweep", "Submit a run for each combination of values; a few train at once."),
    "debug": ("runs.debug:debug", "Allocate one or two nodes as a run would, and open a shell."),
    "status": ("runs.status:status", "List the newest runs: state, step, loss, checkpoint, reason."),
    "show": ("runs.show:show", "Show one run in full: attempts, decisions, checkpoints, code."),
    "compare": ("runs.compare:compare", "Compare runs: where they differ, speed, losses at the steps they share."),
    "wait": ("runs.events:wait", "Wait until a run ends, and return its result as the exit code."),
    "events": ("runs.events:events", "Print the timeline of a run: events, decisions, states."),
    "logs": ("live_jobs.logs:logs", "Print the logs of ranks, agents and the controller."),
    "top": ("live_jobs.top:top", "Show a live run: step, tokens/s, loss, and where every rank is."),
    "attach": ("live_jobs.attach:attach", "Print the stacks of a live job's ranks without stopping them."),
    "shell": ("live_jobs.shell:shell", "Open a shell on a node of a live job, or run a command there."),
    "save": ("live_jobs.live_attempt:save", "Save a checkpoint now; training continues."),
    "cancel": ("runs.cancel_resume:cancel", "Save a checkpoint, then stop the runs."),
    "resume": ("runs.cancel_resume:resume", "Continue a run that is held, failed or cancelled."),
    "priority": ("runs.priority:priority", "Change the order of your own waiting runs."),
    "tag": ("runs.tags:tag", "Add tags to a run, or remove them."),
    "rm": ("rm:rm", "Remove runs that are over: folder, checkpoints, registry rows."),
    "ckpt": ("checkpoints.group:ckpt", "List, verify, compare, export, import, pin and clean up checkpoints."),
    "restore-tests": ("restore_tests:restore_tests", "List restore tests of checkpoints, and which are due."),
    "nodes": ("cluster.nodes:nodes", "List the nodes that runs have used; release excluded ones."),
    "config": ("config:config", "Show, validate and compare configurations."),
    "data": ("data:data", "Turn documents into token shards for training."),
    "db": ("db:db", "Locate, back up or rebuild the registry."),
    "controller": ("cluster.controller:controller", "Start, stop, inspect or install the controller."),
    "init": ("cluster.init:init", "Ask Slurm about this cluster, and write your settings."),
    "doctor": ("cluster.doctor:doctor", "Check this machine and cluster, and list what to fix."),
    "completion": ("completion.completion:completion", "Print the completion script for a shell: bash, zsh or fish."),
    "drill": ("drills.drill:drill", "Inject a fault and score the reaction."),
    "demo": ("drills.demo:demo", "Run a small training job here that is killed and recovers."),
}
"""Function of each verb (`module:function` below orchestrator.cli) and its purpose."""


@click.group(
    cls=LazyGroup,
    table=VERBS,
    invoke_without_command=True,
    epilog="`orch` alone lists live runs, and runs that need you (held, or failed in the last week) with the command "
    "to type. `orch VERB -h` explains a verb.",
)
@click.pass_context
def orch(context: click.Context) -> None:
    """A fault-tolerant training orchestrator for Slurm clusters."""
    if context.invoked_subcommand is None:
        from orchestrator.cli.runs.status import overview  # the verb's module is loaded only when it is used

        overview(context.find_object(Screen) or Screen())


def verbs() -> list[str]:
    """Return every verb as it is typed: `submit`, `ckpt ls`."""
    context = click.Context(orch)
    found = []
    for name in orch.list_commands(context):
        command = orch.get_command(context, name)
        inner = command.list_commands(context) if isinstance(command, click.Group) else [""]
        found += [f"{name} {word}".strip() for word in inner]
    return found


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code. Errors are reported as text or JSON."""
    words = list(sys.argv[1:] if args is None else args)
    screen = Screen()
    screen.words = tuple(words)
    own = list(itertools.takewhile(lambda word: word != "--", words))  # the rest is another program's
    screen.json = "--json" in own  # known before parsing, so a parsing error is JSON too
    screen.debug = "--debug" in own
    try:
        result = orch.main(words, prog_name="orch", obj=screen, standalone_mode=False)
        screen.flush()
    except ReaderGone:
        return READER_GONE
    except OutputLost as error:
        screen.json = False  # a JSON object cannot be written anywhere
        return _report_error(screen, error)
    except OrchError as error:
        return _report_error(screen, error)
    except click.exceptions.NoArgsIsHelpError as error:
        screen.note(error.ctx.get_help() if error.ctx else error.format_message())
        return 2
    except click.ClickException as error:
        return _usage(screen, error, words)
    except (click.Abort, KeyboardInterrupt):
        screen.report_interrupt()
        return 130
    except OSError as error:
        what = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        return _report_error(screen, Precondition(what, hint=find_remedy(error)))
    except UnicodeEncodeError as error:
        what = f"{error.object[error.start : error.end]!a} is not UTF-8 text"
        return _report_error(screen, ConfigError(what, hint="type it in a UTF-8 terminal (`locale` shows yours)"))
    except MemoryError:
        hint = "`ulimit -v` shows this shell's limit; free some memory or raise it, then run the same command again"
        return _report_error(screen, Precondition("not enough memory", hint=hint))
    except Exception as error:  # outermost edge: recorded and reported  # noqa: BLE001
        return _internal(screen, error, words)
    return result if isinstance(result, int) else 0


def _report_error(screen: Screen, error: OrchError) -> int:
    if screen.debug:
        screen.note(traceback.format_exc())
    screen.error(type(error).__name__, error.what, error.where, error.hint)
    return error.exit_code


def _usage(screen: Screen, error: click.ClickException, words: Sequence[str]) -> int:
    context = error.ctx if isinstance(error, click.UsageError) else None
    verb = next((f"orch {word}" for word in words if word in VERBS), "orch")
    path = context.command_path if context else verb
    hint = f"see `{path} -h`"
    params = context.command.params if isinstance(error, click.NoSuchOption) and context else []
    if any("KEY=VALUE" in str(item.metavar) for item in params):
        hint = f"type configuration keys without dashes (KEY=VALUE), and quote values that contain spaces; {hint}"
    what = " ".join(error.format_message().split()).rstrip(".").replace(*_WHOLE_NUMBER)
    is_file = isinstance(error, click.FileError)
    screen.error("NotFound" if is_file else "Usage", what, f"command line: {path}", hint)
    return NotFound.exit_code if is_file else 2


_WHOLE_NUMBER = ("is not a valid integer range", "is not a whole number")


def redact_command_line(words: Sequence[str]) -> str:
    """Return a command line that may be stored, without values of `env` or `notify` or credentials in URLs."""
    from checkpointing.storage.backends import without_secrets

    return without_secrets(
        " ".join(re.sub(r"(?s)^(\+?(?:env|notify)(?:\.[^=]*)?=).*", r"\1***", word) for word in words)
    )


def _internal(screen: Screen, error: Exception, words: Sequence[str]) -> int:
    from orchestrator.home import make_state_home

    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib's, for `~` in a path
        what = f"your home folder is not known: HOME is not set, and uid {os.getuid()} has no account here"
        with suppress(RuntimeError):
            Path.home()
            what = "a path begins with ~NAME, and NAME has no account here"
        hint = "type the full path, or set HOME: `export HOME=FOLDER`"
        return _report_error(screen, Precondition(what, hint=hint))
    text = traceback.format_exc()
    try:
        saved = make_state_home() / "last-error.txt"
        descriptor = os.open(saved, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", errors="backslashreplace") as stream:
            os.fchmod(descriptor, 0o600)  # an existing file keeps its mode
            stream.write(f"orch {redact_command_line(words)}\n\n{text}")
        where = f"the traceback is in {saved}"
    except OSError:
        where = "the traceback could not be saved; --debug prints it"
    if screen.debug:
        screen.note(text)
    hint = "this is a defect in orch; please report it with that file"
    if os.environ.get("PYTHONPATH"):
        hint = "a module on PYTHONPATH may hide one of orch's: `unset PYTHONPATH`, then run the command again"
    screen.error("Internal", f"internal error: {type(error).__name__}: {error}", where, hint)
    return 1


def _complete(line: str) -> int:
    from orchestrator.cli.completion.candidates import answer  # only for completion

    screen = Screen()
    try:
        for candidate in answer(orch, line):
            screen.raw(candidate)
    except (OSError, OrchError, RuntimeError):
        return 1  # unusable state folder: the verb itself reports it, completion stays silent
    return 0


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `orch` program."""
    prepare()
    typed = os.environ.get("_ORCH_COMPLETE")  # the command line so far, on Tab
    sys.exit(run(args) if typed is None else _complete(typed))


if __name__ == "__main__":
    main()
