"""A rank's report of its own end: to its log, its agent and the outcomes of its node, each as far as it still can."""

import socket
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.contract.failures.outcome import ExitCode, RankOutcome, legible
from trainer.contract.messages.ranks import ReportedEnd
from trainer.contract.ranks.progress import ProgressCell
from trainer.contract.ranks.rank_messages import RankSpec, append_outcome, send_message
from trainer.contract.run_dir import RunDir
from trainer.contract.secrets.secret_redaction import in_use
from trainer.worker import workload
from trainer.worker.reporting import flight_recorder
from trainer.worker.reporting.secondary_failure import is_secondary_failure
from trainer.worker.reporting.stderr_best_effort import flush, write_stderr
from trainer.worker.startup.rendezvous import is_node_fault
from trainer.worker.training.spikes import BadStep

_MAX_MESSAGE, _MAX_TRACEBACK = 8000, 1 << 18
"""Characters of an exception's message and of its traceback that are kept: a message may hold a whole data set."""


def finished_outcome(spec: RankSpec, cell: ProgressCell, code: ExitCode) -> RankOutcome:
    """The end of a rank that did what it was asked to."""
    return _outcome(spec, cell, code)


def failed_outcome(spec: RankSpec, cell: ProgressCell, error: BaseException) -> RankOutcome:
    """The end of a rank that `error` ended."""
    text = shorten(in_use().text("".join(traceback.format_exception(error))), _MAX_TRACEBACK)
    write_stderr(text)
    flight_recorder.dump(spec, error)
    secondary = is_secondary_failure(error) and not is_node_fault(error)
    cause = {
        "exception": type(error).__name__,
        "message": shorten(in_use().text(said(error)), _MAX_MESSAGE),
        "traceback": text,
        "secondary": secondary,
    }
    last = _outcome(spec, cell, _exit_code(error, secondary), **cause)
    # It is noticed a step later: the step that went wrong is the one to compare.
    return replace(last, step=error.step, position=error.position) if isinstance(error, BadStep) else last


def said(error: BaseException) -> str:
    """The message of any exception: one whose own `__str__` raises, too."""
    return str(traceback.TracebackException(type(error), error, None))


def shorten(text: str, most: int) -> str:
    """The beginning and the end of a text that is too long, and how much lies between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def report_end(spec: RankSpec, control: socket.socket, last: RankOutcome) -> None:
    """Tell the agent and keep the outcome; neither can change how the rank ends."""
    try:
        end = ReportedEnd(
            exit_code=last.exit_code, step=last.step, exception=last.exception,
            message=None if last.message is None else legible(last.message)[: 2 * _MAX_MESSAGE],
            secondary=last.secondary, position=last.position,
        )  # fmt: skip
        send_message(control, end)
    except OSError as error:
        write_stderr(f"orch: could not report the end of this rank to its agent: {error}")
    try:
        append_outcome(RunDir(Path(spec.run_dir)).attempt(spec.attempt), last)
    except OSError as error:  # the disk may be what is wrong: the agent has the cause
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


def _outcome(spec: RankSpec, cell: ProgressCell, code: ExitCode, **cause: Any) -> RankOutcome:
    reading = cell.read()
    return RankOutcome(
        rank=spec.rank,
        generation=spec.generation,
        node=spec.node_name,
        step=reading.step if reading else 0,
        exit_code=int(code),
        time=time.time(),
        **cause,
    )
