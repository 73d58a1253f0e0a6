"""A local job: the process that holds it, starts its tasks through submitit, and records how they end.

Started as `python -P -m orchestrator.scheduler.local.local_job INTENT`. It leaves its parent's session, so that Ctrl-C
in the terminal and the end of the submitting process do not affect it. The parent waits until the job is recorded.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from submitit.core.utils import JobPaths
from submitit.local.local import LocalExecutor, LocalJob

from checkpointing.storage.storage_errors import explain_disk_error, is_disk_error
from checkpointing.storage.trusted_path import pin_path
from orchestrator.scheduler.local import local_scheduler as records
from orchestrator.scheduler.local.local_scheduler import Intent, JobEnd, JobProcess
from orchestrator.scheduler.script import load_entry, start_arguments
from trainer.protocol.failures.outcome import ExitCode

KILL_WAIT_S = 30.0  # seconds between SIGTERM and SIGKILL; Slurm's default KillWait
_POLL_S = 0.04
_READY = b"ready"
_LONGEST = 4096


class _Executor(LocalExecutor):  # type: ignore[misc]  # submitit is not type-checked here
    """Executor that writes the payload for the calling process, which is the job itself."""

    def _submit_command(self, command: str) -> Any:
        return LocalJob(folder=self.folder, job_id=str(os.getpid()), tasks=list(range(self._num_tasks())))


class JobRunner:
    """Life cycle of one local job: held, running, finished. GPUs are assigned per node."""

    def __init__(self, intent: Intent, host: JobProcess) -> None:
        self._intent, self._host = intent, host
        self._tasks: list[subprocess.Popen[bytes]] = []
        self._cancelled_at: float | None = None  # by a signal or at the time limit
        self._timed_out = False

    def prepare(self) -> None:
        """Write the payload, and set the environment that submitit and the agents read."""
        intent = self._intent
        made = _Executor(intent.folder)
        made.update_parameters(tasks_per_node=intent.nodes, timeout_min=intent.limit_s / 60)
        made.submit(load_entry(intent.entry), *intent.arguments)
        os.environ.update(
            SUBMITIT_EXECUTOR="local",
            SUBMITIT_LOCAL_JOB_ID=str(os.getpid()),
            SUBMITIT_LOCAL_NTASKS=str(intent.nodes),
            SUBMITIT_LOCAL_NODEID="0",
            SUBMITIT_LOCAL_JOB_NUM_NODES="1",
        )

    def run(self) -> JobEnd:
        """Wait for the release, run the tasks and return how they ended."""
        signal.signal(signal.SIGTERM, self._cancel)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # inherited by tasks: the warning must not kill a starting task
        if not self._await_release():
            return self._end("CANCELLED", "cancelled while held")
        records.write_job_process(self._intent.folder, replace(self._host, started_at=time.time()))
        try:
            self._start_tasks()
            codes = self._wait()
        finally:
            records.end_marked(self._intent.name, 0.0)
        if self._timed_out:
            return self._end("TIMEOUT", "the time limit was reached", codes)
        if self._cancelled_at is not None:
            return self._end("CANCELLED", "cancelled", codes)
        bad = [f"node {node}: {code}" for node, code in enumerate(codes) if code]
        return self._end("FAILED" if bad else "COMPLETED", ", ".join(bad), codes)

    def _cancel(self, *_: object) -> None:
        """Forward SIGTERM. From the first call on, the tasks have `KILL_WAIT_S` seconds to exit."""
        if self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
        self._signal_tasks(signal.SIGTERM)

    def _signal_tasks(self, number: int) -> None:
        for task in self._tasks:
            task.send_signal(number)

    def _await_release(self) -> bool:
        """Wait for the release. Return False if the job is cancelled or its folder deleted first."""
        while not (self._intent.folder / records.RELEASED).exists():
            if self._cancelled_at is not None or not self._intent.folder.is_dir():
                return False
            time.sleep(_POLL_S)
        return self._cancelled_at is None

    def _start_tasks(self) -> None:
        intent = self._intent
        *shell, script = intent.command
        command = [*shell, f"{script} {start_arguments(intent.run_dir, intent.named)}"]
        for node in range(intent.nodes):
            paths = JobPaths(intent.folder, str(os.getpid()), node)
            place = {
                "SUBMITIT_LOCAL_LOCALID": str(node),
                "SUBMITIT_LOCAL_GLOBALID": str(node),
                "CUDA_VISIBLE_DEVICES": intent.devices[node],
            }
            with paths.stdout.open("a") as stdout, paths.stderr.open("a") as stderr:
                task = subprocess.Popen(
                    command, env={**os.environ, **place}, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
                )
            self._tasks.append(task)
        if self._cancelled_at is not None:
            self._signal_tasks(signal.SIGTERM)

    def _wait(self) -> tuple[int | None, ...]:
        """Wait for all tasks to exit. A failing task does not end its peers.

        As in Slurm, USR2 is sent before the limit and SIGTERM at it.
        """
        limit = time.monotonic() + self._intent.limit_s
        warn_at = limit - self._intent.signal_lead
        while any(task.poll() is None for task in self._tasks):
            now = time.monotonic()
            if now >= warn_at:
                warn_at = math.inf
                self._signal_tasks(signal.SIGUSR2)
            if now >= limit and not self._timed_out:
                self._timed_out = True
                self._cancel()
            if self._cancelled_at is not None and now >= self._cancelled_at + KILL_WAIT_S:
                self._signal_tasks(signal.SIGKILL)
            time.sleep(_POLL_S)
        return tuple(task.returncode for task in self._tasks)

    @staticmethod
    def _end(state: str, reason: str, codes: tuple[int | None, ...] = ()) -> JobEnd:
        return JobEnd(state=state, reason=reason, ended_at=time.time(), exit_codes=codes)


def _begin(intent: Intent) -> JobRunner | None:
    """Return the prepared job, or None if another process is already the job. Raises any error in preparing it."""
    host = records.claim(intent.folder)
    if host is None:  # a second submission under this name: the first one is the job
        return None
    job = JobRunner(intent, host)
    try:
        job.prepare()
    except OSError as error:
        # After a full disk nothing remains, so the next submission under this name is a new job.
        if is_disk_error(error):
            records.unclaim(intent.folder)
        raise
    return job


def _end_after_error(error: Exception) -> JobEnd:
    codes = (ExitCode.STORAGE,) if is_disk_error(error) else ()
    return JobEnd(state="FAILED", reason=f"{type(error).__name__}: {error}", ended_at=time.time(), exit_codes=codes)


def _live(job: JobRunner, intent: Intent) -> None:
    """Run the job and record its end."""
    try:
        end = job.run()
    except Exception as error:  # noqa: BLE001  # outermost edge of this process: record its end
        _log_traceback()
        end = _end_after_error(error)
    if intent.folder.is_dir():
        records.write_end(intent.folder, end)


def main(arguments: list[str]) -> int:
    """Start the job in a new session. Return 0 once it is recorded, or an error code.

    ExitCode.STORAGE means that the disk was full and nothing was started. The reason is on stderr.
    """
    intent = records.read_intent(Path(arguments[0]))
    report, ready = os.pipe()
    child = os.fork()
    if child:
        os.close(ready)
        return _startup_exit_code(os.read(report, _LONGEST))
    os.close(report)
    os.setsid()
    os.umask(0o077)
    # A cancel before the handler is installed stays blocked until then; unhandled, it would end the job as FAILED.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        # This path cannot be redirected to another folder. Raises NotPrivate.
        run_dir = Path(intent.run_dir)
        intent = replace(intent, submission=str(pin_path(run_dir) / intent.folder.relative_to(run_dir)))
        log = os.open(intent.folder / "local-job.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        job = _begin(intent)
    except Exception as error:  # noqa: BLE001  # outermost edge: report to the waiting process
        _log_traceback()
        os.write(ready, explain_disk_error(error, intent.folder).encode(errors="replace")[:_LONGEST])
        host = records.read_job_process(intent.folder)
        if host is not None and host.pid == os.getpid():
            records.write_end(intent.folder, _end_after_error(error))
        return 1
    os.write(ready, _READY)
    os.close(ready)
    if job is not None:
        _live(job, intent)
    return 0


def _log_traceback() -> None:
    with contextlib.suppress(OSError):  # the log's disk may have caused the error
        traceback.print_exc()


def _startup_exit_code(report: bytes) -> int:
    """Return the exit code to give the process that waits for the job, based on the job's report."""
    if report == _READY:
        return 0
    sys.stderr.write(report.decode(errors="replace"))
    return ExitCode.STORAGE if report else ExitCode.ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
