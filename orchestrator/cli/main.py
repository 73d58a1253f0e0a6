"""The `orch` program: the table of verbs and their modules, and the edge where errors become exit codes."""

import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from orchestrator.cli.terminal.command_classes import DELETED_BY_ORCH, LazyGroup, NoSuchCommand
from orchestrator.cli.terminal.render import Screen
from orchestrator.cli.terminal.streams import READER_GONE, OutputLost, ReaderGone, prepare
from orchestrator.errors import ConfigError, NotFound, OrchError, Precondition, RunExpected
from orchestrator.near_words import nearest

VERBS = {
    "submit": ("orchestrator.cli.runs.submit:submit", "Submit a run; orch restarts it until it is finished."),
    "status": ("orchestrator.cli.runs.status:status", "List the newest runs: state, step, loss, checkpoint, reason."),
    "show": ("orchestrator.cli.runs.show:show", "Show one run in full: attempts, decisions, checkpoints, code."),
    "compare": (
        "orchestrator.cli.comparison.compare:compare",
        "Compare runs: where they differ, speed, losses at the steps they share.",
    ),
    "wait": ("orchestrator.cli.runs.events:wait", "Wait until a run ends, and return its result as the exit code."),
    "events": ("orchestrator.cli.runs.events:events", "Print the timeline of a run: events, decisions, states."),
    "logs": ("orchestrator.cli.live_jobs.logs:logs", "Print the logs of ranks, agents and the controller."),
    "top": (
        "orchestrator.cli.live_jobs.top:top",
        "Show a live run: step, tokens/s, loss, and where every rank is.",
    ),
    "attach": (
        "orchestrator.cli.live_jobs.attach:attach",
        "Print the stacks of a live job's ranks without stopping them.",
    ),
    "save": ("orchestrator.cli.live_jobs.save:save", "Save a checkpoint now; training continues."),
    "cancel": ("orchestrator.cli.runs.cancel_resume:cancel", "Save a checkpoint, then stop the runs."),
    "resume": ("orchestrator.cli.runs.cancel_resume:resume", "Continue a run that is held, failed or cancelled."),
    "tag": ("orchestrator.cli.runs.tags:tag", "Add tags to a run, or remove them."),
    "rm": ("orchestrator.cli.rm:rm", "Remove runs that are over: folder, checkpoints, registry rows."),
    "ckpt": (
        "orchestrator.cli.checkpoints.group:ckpt",
        "List, verify, compare, export, import, pin and clean up checkpoints.",
    ),
    "restore-tests": (
        "orchestrator.cli.restore_tests:restore_tests",
        "List restore tests of checkpoints, and which are due.",
    ),
    "nodes": ("orchestrator.cli.cluster.nodes:nodes", "List the nodes that runs have used; release excluded ones."),
    "config": ("orchestrator.cli.config:config", "Show, validate and compare configurations."),
    "data": ("orchestrator.cli.data:data", "Turn text into token shards for training."),
    "db": ("orchestrator.cli.db:db", "Locate, back up or rebuild the registry."),
    "controller": ("orchestrator.cli.cluster.controller:controller", "Start, stop, inspect or install the controller."),
    "doctor": ("orchestrator.cli.cluster.doctor:doctor", "Check this machine and cluster, and list what to fix."),
    "completion": (
        "orchestrator.cli.completion.completion:completion",
        "Print the completion script of a shell: bash, zsh or fish.",
    ),
    "drill": ("orchestrator.cli.drills.drill:drill", "Inject a fault and score the reaction."),
    "demo": ("orchestrator.cli.drills.demo:demo", "Run a small training here that is killed and recovers."),
}


@click.group(
    cls=LazyGroup,
    table=VERBS,
    of_a_run="status",
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
    screen.json = "--json" in words  # known before parsing, so a parsing error is JSON too
    screen.debug = "--debug" in words
    try:
        result = orch.main(words, prog_name="orch", obj=screen, standalone_mode=False)
        screen.flush()
    except ReaderGone:
        return READER_GONE
    except OutputLost as error:
        screen.json = False  # no place to write an object to
        return _report_error(screen, error)
    except RunExpected as error:
        error.hint = DELETED_BY_ORCH if words[0] == "rm" else f"orch {shlex.join(_replace_run_name(error, words))}"
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
        return _report_error(screen, _system_error(error))
    except UnicodeEncodeError as error:
        if not (shown := [word for word in words if error.object[error.start : error.end] in word]):
            return _internal(screen, error, words)
        hint = "type it in a UTF-8 terminal (`locale` shows yours)"
        return _report_error(screen, ConfigError(f"{shown[0]!a} is not UTF-8 text", where="command line", hint=hint))
    except MemoryError:
        return _report_error(screen, Precondition("not enough memory", hint=_MORE_MEMORY))
    except Exception as error:  # outermost edge: recorded and reported  # noqa: BLE001
        return _internal(screen, error, words)
    return result if isinstance(result, int) else 0


_MORE_MEMORY = "`ulimit -v` shows this shell's limit; free some memory or raise the limit, then type the same again"


def _report_error(screen: Screen, error: OrchError) -> int:
    if screen.debug:
        screen.note(traceback.format_exc())
    screen.error(type(error).__name__, error.what, error.where, error.hint)
    return error.exit_code


def _without_home() -> Precondition:
    """Return the error for pathlib's RuntimeError on `~` in a path or in the location of the user's configuration."""
    with suppress(RuntimeError):
        Path.home()
        return Precondition("a path begins with ~NAME, and NAME has no account here", hint="type the whole path")
    what = f"your home folder is not known: HOME is not set, and uid {os.getuid()} has no account here"
    return Precondition(what, where="$HOME", hint="set HOME: `export HOME=FOLDER`")


def _system_error(error: OSError) -> Precondition:
    if isinstance(error, FileNotFoundError) and not error.filename and not _has_current_folder():
        where = os.environ.get("PWD", "")
        return Precondition("the current folder is not there any more", where=where, hint="cd to a folder that is")
    name = f": {error.filename}" if error.filename else ""
    from orchestrator.cli.terminal.streams import cure  # only after an error

    return Precondition(f"{error.strerror or error}{name}", hint=cure(error))


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _is_near(error: click.ClickException) -> bool:
    """Return whether click's suggestion is a likely typo and not an unrelated word."""
    if not isinstance(error, click.NoSuchOption):
        return True
    return bool(nearest(error.option_name, error.possibilities or (), 0.8))


def _replace_run_name(error: RunExpected, words: Sequence[str]) -> list[str]:
    return [error.run if word == error.given else word for word in words]


_WHOLE_NUMBER = ("is not a valid integer range", "is not a whole number")


def _usage(screen: Screen, error: click.ClickException, words: Sequence[str]) -> int:
    context = error.ctx if isinstance(error, click.UsageError) else None
    verb = next((f"orch {word}" for word in words if word in VERBS), "orch")
    path = context.command_path if context else verb
    code = "NotFound" if isinstance(error, click.FileError) else "Usage"
    hint = ""
    if isinstance(error, click.NoSuchOption):
        from orchestrator.cli.terminal.command_classes import what_to_type  # only after a mistake

        hint = what_to_type(error, words)
    if isinstance(error, NoSuchCommand):
        hint = error.hint
    said = error.message if hint or not _is_near(error) else error.format_message()
    what = " ".join(said.split()).rstrip(".").replace(*_WHOLE_NUMBER)
    screen.error(code, what, f"command line: {path}", hint or f"see `{path} -h`")
    return NotFound.exit_code if code == "NotFound" else 2


def redact_command_line(words: Sequence[str]) -> str:
    """Return a command line fit for storage: without values of `env` and `notify` and without credentials in URLs."""
    from checkpointing.storage.backends import without_secrets

    return without_secrets(
        " ".join(re.sub(r"(?s)^(\+?(?:env|notify)(?:\.[^=]*)?=).*", r"\1***", word) for word in words)
    )


def _internal(screen: Screen, error: Exception, words: Sequence[str]) -> int:
    from orchestrator.cli.terminal.shadowed_modules import find_shadowed_module
    from orchestrator.home import make_state_home

    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return _report_error(screen, _without_home())
    if found := find_shadowed_module():
        what = f"PYTHONPATH has another `{found[0]}` than orch needs ({type(error).__name__}: {error})"
        hint = "`unset PYTHONPATH`, or rename that file"
        return _report_error(screen, Precondition(what, where=str(found[1]), hint=hint))
    text = traceback.format_exc()
    where = ""
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
    what = f"internal error: {type(error).__name__}: {error}"
    screen.error("Internal", what, where, "this is a defect in orch; please report it with that file")
    return 1


def _complete(line: str) -> int:
    """Print the completion candidates that a shell requests."""
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
    asked = os.environ.get("_ORCH_COMPLETE")  # the command line so far, on Tab
    sys.exit(run(args) if asked is None else _complete(asked))


if __name__ == "__main__":
    main()
