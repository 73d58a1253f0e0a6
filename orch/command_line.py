"""Run `orch ... --json` from a script, with the same checks and messages as in a terminal."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from orchestrator import errors

_PROGRAM = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r}); "
_PROGRAM += "from orchestrator.cli.entry import main; main()"


PUBLIC_ERRORS = (
    errors.CheckpointInvalid, errors.ConfigError, errors.NotFound, errors.Precondition, errors.RegistryError,
    errors.RunCancelled, errors.RunFailed, errors.SlurmUnreachable, errors.SubmitRejected, errors.WaitTimeout,
    errors.OrchError,
)  # fmt: skip


class OrchWarning(UserWarning):
    """Warning issued by an `orch` command; `warnings.filterwarnings` can silence it or turn it into an error."""


def ask(verb: str, *names: str, options: Sequence[str] = (), accept: Collection[int] = ()) -> Any:
    """Run a command and return the data that it prints. Raises the OrchError that it reports.

    `names` are passed unchanged, even with a leading dash. An exit code in `accept` is not an error. Ctrl-C reaches
    the command once, and the command's message becomes a note on the KeyboardInterrupt.
    """
    words = (verb, *options, "--", *names)
    if not sys.executable:
        raise errors.OrchError("the path of this process's Python is unknown", hint="set sys.executable")
    text, code = _run_command(words)
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "error" in answer:
        raise _public_error(answer["error"], code)
    if not isinstance(answer, dict) or (code != 0 and code not in accept):
        end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        typed = " ".join(word for word in words if word != "--")
        raise errors.OrchError(f"orch {end} without an answer", where=typed, hint="see its messages on stderr")
    for warning in answer["warnings"]:
        warnings.warn(warning["message"], OrchWarning, stacklevel=3)
    return answer["data"]


def _run_command(words: Sequence[str]) -> tuple[str, int]:
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONINSPECT", "PYTHONIOENCODING")}
    command = [sys.executable, "-P", "-c", _PROGRAM, "--json", "--quiet", *words]
    try:
        # In its own process group, since a second interrupt from the terminal would end it immediately.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environ, text=True, encoding="utf-8",
            errors="replace", process_group=0,
        )  # fmt: skip
    except (OSError, UnicodeEncodeError) as error:
        raise errors.OrchError(f"orch cannot be started: {error}", where=" ".join(words)[:200]) from error
    with process:
        try:
            return process.communicate()[0], process.returncode
        except KeyboardInterrupt as interrupt:
            process.send_signal(signal.SIGINT)
            _add_message(interrupt, process.communicate()[0])
            raise


def _add_message(interrupt: KeyboardInterrupt, text: str) -> None:
    """Add what remains after the interrupted command: a run that continues, or a request that is still pending."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(text)["error"]
        message = "; ".join(filter(None, (error["message"], error["hint"])))
        interrupt.add_note(message)
        warnings.warn(message, OrchWarning, stacklevel=5)


def _public_error(fields: dict[str, str], code: int) -> errors.OrchError:
    """Return the error as its own class if public, else as a public ancestor, else as the class for its exit code."""
    own = getattr(errors, fields["code"], None)
    candidates = [*(own.__mro__ if isinstance(own, type) else ()), *(k for k in PUBLIC_ERRORS if k.exit_code == code)]
    kind = next((candidate for candidate in candidates if candidate in PUBLIC_ERRORS), errors.OrchError)
    error: errors.OrchError = kind(fields["message"], where=fields["where"], hint=fields["hint"])
    for note in filter(None, (fields["where"], fields["hint"])):  # a traceback prints them below the error
        error.add_note(f"  {note}")
    return error
