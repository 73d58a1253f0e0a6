"""Typing `orch ... --json` for a script: what it checks and says is what people at a terminal get."""

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
    """What `orch` warns of; `warnings.filterwarnings` can silence it, or make it an error."""


def ask(verb: str, *names: str, options: Sequence[str] = (), accept: Collection[int] = ()) -> Any:
    """The data that a command line answers with; raises the OrchError that it tells of.

    `names` are taken as they are, also where they begin with a dash. Data that comes with one of the exit codes in
    `accept` is no error. Ctrl-C reaches the command once, and what it says of that is in the KeyboardInterrupt's notes.
    """
    words = (verb, *options, "--", *names)
    if not sys.executable:
        raise errors.OrchError("this process does not know its Python", hint="set sys.executable")
    answer, code = _typed(words)
    if "error" in answer:
        raise _error_of(answer["error"], code)
    for warning in answer["warnings"]:
        warnings.warn(warning["message"], OrchWarning, stacklevel=3)
    if code != 0 and code not in accept:
        raise _unexpected(words, code)
    return answer["data"]


def _typed(words: Sequence[str]) -> tuple[dict[str, Any], int]:
    """The object that the command prints, and its exit code."""
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONINSPECT", "PYTHONIOENCODING")}
    command = [sys.executable, "-P", "-c", _PROGRAM, "--json", "--quiet", *words]
    try:
        # A process group of its own: a terminal would interrupt it besides, and twice means at once.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environ, text=True, encoding="utf-8",
            errors="replace", process_group=0,
        )  # fmt: skip
    except (OSError, UnicodeEncodeError) as error:
        raise errors.OrchError(f"orch cannot be started: {error}", where=" ".join(words)[:200]) from error
    with process:
        try:
            text = process.communicate()[0]
        except KeyboardInterrupt as interrupt:
            process.send_signal(signal.SIGINT)
            _tell(interrupt, process.communicate()[0])
            raise
    return _parsed(text, words, process.returncode), process.returncode


def _tell(interrupt: KeyboardInterrupt, text: str) -> None:
    """Say what the interrupted command has left: a run that goes on, a request that stands."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        told = json.loads(text)["error"]
        said = "; ".join(filter(None, (told["message"], told["hint"])))
        interrupt.add_note(said)
        warnings.warn(said, OrchWarning, stacklevel=5)


def _parsed(text: str, words: Sequence[str], code: int) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise _unexpected(words, code) from error
    if not isinstance(answer, dict):
        raise _unexpected(words, code)
    return answer


def _unexpected(words: Sequence[str], code: int) -> errors.OrchError:
    end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    typed = " ".join(word for word in words if word != "--")
    return errors.OrchError(f"orch {end} without an answer", where=typed, hint="stderr may say why")


def _error_of(told: dict[str, str], code: int) -> errors.OrchError:
    """The error as a script catches it: of a public class that is its own, its ancestor, or of the same exit code."""
    own = getattr(errors, told["code"], None)
    ancestors = own.__mro__ if isinstance(own, type) else ()
    of_code = [kind for kind in PUBLIC_ERRORS if kind.exit_code == code]
    kind = next((one for one in ancestors if one in PUBLIC_ERRORS), next(iter(of_code), errors.OrchError))
    error: errors.OrchError = kind(told["message"], where=told["where"], hint=told["hint"])
    for note in filter(None, (told["where"], told["hint"])):  # a traceback prints them below the error
        error.add_note(f"  {note}")
    return error
