"""Runs of `orch ... --json` for a script, with the same checks and messages as at a terminal."""

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
    """Warning of an `orch` command; `warnings.filterwarnings` can silence it or turn it into an error."""


def ask(verb: str, *names: str, options: Sequence[str] = (), accept: Collection[int] = ()) -> Any:
    """Return the data that a command prints; raises the OrchError that it reports.

    `names` are passed verbatim, even with a leading dash. Data with an exit code in `accept` is not an error. Ctrl-C is
    sent to the command once, and the command's message about it becomes a note of the KeyboardInterrupt.
    """
    words = (verb, *options, "--", *names)
    if not sys.executable:
        raise errors.OrchError("this process does not know its Python", hint="set sys.executable")
    answer, code = _run_command(words)
    if "error" in answer:
        raise _public_error(answer["error"], code)
    for warning in answer["warnings"]:
        warnings.warn(warning["message"], OrchWarning, stacklevel=3)
    if code != 0 and code not in accept:
        raise _no_answer_error(words, code)
    return answer["data"]


def _run_command(words: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Return the object that the command prints, and its exit code."""
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONINSPECT", "PYTHONIOENCODING")}
    command = [sys.executable, "-P", "-c", _PROGRAM, "--json", "--quiet", *words]
    try:
        # In its own process group, because a terminal would interrupt it a second time, which means at once.
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
    return _parse_answer(text, words, process.returncode), process.returncode


def _tell(interrupt: KeyboardInterrupt, text: str) -> None:
    """Report what the interrupted command left behind: a run that continues, a request that is still pending."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        told = json.loads(text)["error"]
        said = "; ".join(filter(None, (told["message"], told["hint"])))
        interrupt.add_note(said)
        warnings.warn(said, OrchWarning, stacklevel=5)


def _parse_answer(text: str, words: Sequence[str], code: int) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise _no_answer_error(words, code) from error
    if not isinstance(answer, dict):
        raise _no_answer_error(words, code)
    return answer


def _no_answer_error(words: Sequence[str], code: int) -> errors.OrchError:
    end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    typed = " ".join(word for word in words if word != "--")
    return errors.OrchError(f"orch {end} without an answer", where=typed, hint="stderr may say why")


def _public_error(told: dict[str, str], code: int) -> errors.OrchError:
    """Return the error with its public class, else its nearest public ancestor, else one with its exit code."""
    own = getattr(errors, told["code"], None)
    ancestors = own.__mro__ if isinstance(own, type) else ()
    of_code = [kind for kind in PUBLIC_ERRORS if kind.exit_code == code]
    kind = next((one for one in ancestors if one in PUBLIC_ERRORS), next(iter(of_code), errors.OrchError))
    error: errors.OrchError = kind(told["message"], where=told["where"], hint=told["hint"])
    for note in filter(None, (told["where"], told["hint"])):  # a traceback prints them below the error
        error.add_note(f"  {note}")
    return error
