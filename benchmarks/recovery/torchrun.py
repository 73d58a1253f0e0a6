"""The script under torchrun 2.13; two torchruns on this machine represent two nodes."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.recovery.job import free_port, hit
from benchmarks.recovery.ours import SCRIPT, first_again, wait_for_victim
from benchmarks.recovery.polling import NotInTimeError, lines, until

_SEEN = re.compile(r"failed \(exitcode: -\d+\) local_rank: \d+ \(pid: (\d+)\)")
_HIT_AT = 13


class Torchrun:
    """A job of two torchruns with two ranks each; their log lines are recorded with arrival times."""

    def __init__(self, logs: Path, step_seconds: float) -> None:
        logs.mkdir(parents=True)
        words = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
            "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
            "--rdzv-id", "bench", "--local-addr", "127.0.0.1", str(SCRIPT), str(logs), "100000", str(step_seconds),
        ]  # fmt: skip
        self._heard: list[tuple[float, str]] = []
        self.began = time.time()
        self._runs = [
            subprocess.Popen(
                words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for _ in range(2)
        ]  # fmt: skip
        self._ears = [threading.Thread(target=self._hear, args=(run,), daemon=True) for run in self._runs]
        for ear in self._ears:
            ear.start()

    def _hear(self, run: "subprocess.Popen[str]") -> None:
        assert run.stderr is not None
        for line in run.stderr:
            self._heard.append((time.time(), line))

    def detection_time(self, pid: int, seconds: float) -> float:
        """Return when torchrun reported the failure of this process; infinity if it did not in time."""

        def look() -> float | None:
            for at, line in list(self._heard):
                if (seen := _SEEN.search(line)) and int(seen[1]) == pid:
                    return at
            return None

        try:
            return until(look, seconds, "torchrun's word of the failure")
        except NotInTimeError:
            return math.inf

    def __enter__(self) -> "Torchrun":
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            for number in (signal.SIGTERM, signal.SIGKILL):
                # torchrun's workers have their own sessions, and exit with it on SIGTERM.
                run.send_signal(number)
                try:
                    run.wait(15)
                    break
                except subprocess.TimeoutExpired:
                    continue


def fault(folder: Path, number: signal.Signals, step_seconds: float, patience: float) -> dict[str, float]:
    """Send a rank this signal; measure when torchrun reports it and when rank 0 trains again, infinity if never."""
    logs = folder / "torchrun"
    with Torchrun(logs, step_seconds) as job:
        victim = wait_for_victim(logs, _HIT_AT)
        cold = float(lines(logs / "rank-0.jsonl")[0]["time"]) - job.began
        at = hit(victim, number)
        try:
            noticed = job.detection_time(victim, patience)
            back = first_again(logs, at, patience) if math.isfinite(noticed) else math.inf
        finally:
            if number == signal.SIGSTOP:
                os.kill(victim, signal.SIGKILL)
    found = back - noticed if math.isfinite(back) else math.inf
    return {"noticed": noticed - at, "back": found, "cold": cold, "share": found / cold}
