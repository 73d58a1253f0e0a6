"""A rank's report of its own exit, sent to its log, its agent and its node's outcome file if possible."""

import socket
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.protocol.failures.missing_installation import describe_missing
from trainer.protocol.failures.outcome import ExitCode, legible
from trainer.protocol.failures.rank_end import RankEnd, append_outcome
from trainer.protocol.messages.ranks import RankSpec, send_message
from trainer.protocol.rank_progress.progress import ProgressCell
from trainer.protocol.run_dir import RunDir
from trainer.protocol.secrets.secret_redaction import in_use
from trainer.worker import workload
from trainer.worker.reporting.flight_recorder import dump, is_secondary_failure
from trainer.worker.reporting.stderr_best_effort import flush, write_stderr
from trainer.worker.startup.rendezvous import is_node_fault
from trainer.worker.train_loop.spikes import BadStep

_MAX_MESSAGE, _MAX_TRACEBACK = 8000, 1 << 18
"""Maximum characters kept from an exception's message and traceback. A message may contain a whole data set."""


def failed_outcome(spec: RankSpec, cell: ProgressCell, error: BaseException) -> RankEnd:
    """Log `error`, save the flight record, and return the outcome of the failed rank."""
    text = shorten(in_use().text("".join(traceback.format_exception(error))), _MAX_TRACEBACK)
    write_stderr(text)
    dump(spec, error)
    secondary = is_secondary_failure(error) and not is_node_fault(error)
    cause = {
        "exception": type(error).__name__,
        "message": shorten(in_use().text(exception_message(error)), _MAX_MESSAGE) + describe_missing(error),
        "traceback": text,
        "secondary": secondary,
    }
    last = build_outcome(spec, cell, _exit_code(error, secondary), **cause)
    # The failure is noticed a step later; report the step that failed.
    return replace(last, step=error.step, position=error.position) if isinstance(error, BadStep) else last


def exception_message(error: BaseException) -> str:
    """Return the message of an exception, even if its `__str__` raises."""
    return str(traceback.TracebackException(type(error), error, None))


def shorten(text: str, most: int) -> str:
    """Return the beginning and the end of a long text, with the number of characters left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def report_end(spec: RankSpec, control: socket.socket, last: RankEnd) -> None:
    """Send the outcome to the agent and write it to disk. If either fails, the rank exits as usual."""
    try:
        message = None if last.message is None else legible(last.message)[: 2 * _MAX_MESSAGE]
        send_message(control, replace(last, message=message, traceback=None))
    except OSError as error:
        write_stderr(f"orch: could not report this rank's exit to its agent: {error}")
    try:
        append_outcome(RunDir(Path(spec.run_dir)).attempt(spec.attempt), last)
    except OSError as error:  # the disk may be the cause; the agent has the outcome
        write_stderr(f"orch: could not write this rank's outcome: {error}")
    flush()


def _exit_code(error: BaseException, secondary: bool) -> ExitCode:
    if is_node_fault(error):
        return ExitCode.NODE_SUSPECT
    if secondary:
        return ExitCode.RETRY
    if isinstance(error, workload.WorkloadError):
        return ExitCode.NEVER_RETRY
    return ExitCode.ERROR


def build_outcome(spec: RankSpec, cell: ProgressCell, code: ExitCode, **cause: Any) -> RankEnd:
    """Return the outcome of a rank. `cause` has the fields that describe its error."""
    reading = cell.read()
    return RankEnd(
        rank=spec.rank,
        generation=spec.generation,
        node=spec.node_name,
        step=reading.step if reading else 0,
        exit_code=int(code),
        time=time.time(),
        **cause,
    )
