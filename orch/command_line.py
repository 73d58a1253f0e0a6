"""Typing `orch ... --json` for a script: what it checks and says is what people at a terminal get."""

import json
import subprocess
import sys
import warnings
from collections.abc import Collection
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


def ask(*words: str, accept: Collection[int] = ()) -> Any:
    """The data that a command line answers with; raises the OrchError that it tells of.

    Data that comes with one of the exit codes in `accept` is no error.
    """
    command = [sys.executable, "-P", "-c", _PROGRAM, *words, "--json", "--quiet"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    answer = _parsed(done.stdout, words, done.returncode)
    if "error" in answer:
        raise _error_of(answer["error"], done.returncode)
    for warning in answer["warnings"]:
        warnings.warn(warning["message"], OrchWarning, stacklevel=3)
    if done.returncode != 0 and done.returncode not in accept:
        raise _unexpected(words, done.returncode)
    return answer["data"]


def _parsed(text: str, words: tuple[str, ...], code: int) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise _unexpected(words, code) from error
    if not isinstance(answer, dict):
        raise _unexpected(words, code)
    return answer


def _unexpected(words: tuple[str, ...], code: int) -> errors.OrchError:
    end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return errors.OrchError(f"orch {end} without an answer", where=" ".join(words), hint="stderr may say why")


def _error_of(told: dict[str, str], code: int) -> errors.OrchError:
    """The error as a script catches it: of a public class that is its own, its ancestor, or of the same exit code."""
    own = getattr(errors, told["code"], None)
    ancestors = own.__mro__ if isinstance(own, type) else ()
    of_code = [kind for kind in PUBLIC_ERRORS if kind.exit_code == code]
    kind = next((one for one in ancestors if one in PUBLIC_ERRORS), next(iter(of_code), errors.OrchError))
    error: errors.OrchError = kind(told["message"], where=told["where"], hint=told["hint"])
    return error
