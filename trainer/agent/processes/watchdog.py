"""Each agent's watchdog process, which kills the agent if it is stopped by a signal or stuck in the kernel.
Uses only the standard library: `python -S watchdog.py DESCRIPTOR PID SECONDS REPORT NODE NAME`.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

LOOK_SECONDS = 1.0
LATE_SECONDS = 3.0
"""If a check is later than this, this process was not running either.
The whole job was suspended or starved of CPU time.
"""
REPORT_SECONDS = 5.0
"""Time limit for the report; the agent may be stuck in a hung file system."""


def add_silence(silent: float, passed: float, moved: bool) -> float:
    """PURE: return the seconds without a heartbeat, `passed` seconds after a check that found `silent` seconds."""
    return 0.0 if moved or passed > LOOK_SECONDS + LATE_SECONDS else silent + passed


def watch(beats: int, seconds: float) -> bool:
    """Wait until the agent is gone (returns False) or has sent no heartbeat for `seconds` (True)."""
    poll, silent, checked = select.poll(), 0.0, time.monotonic()
    poll.register(beats, select.POLLIN)
    while True:
        moved = bool(poll.poll(LOOK_SECONDS * 1000))
        if moved and not os.read(beats, 65536):
            return False
        now = time.monotonic()
        silent, checked = add_silence(silent, now - checked, moved), now
        if silent >= seconds:
            return True
        if moved:
            time.sleep(LOOK_SECONDS)


def process_state(pid: int) -> str:
    """Describe the state of a process and the kernel function it waits in."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        waits = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return "state unknown"
    words = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "stuck in the kernel"}.get(state, state)
    return words if waits in ("", "0") else f"{words}, in {waits}"


def report(path: Path, node: int, name: str, reason: str) -> None:
    """Write the report for an agent that cannot do so itself."""
    fields = {"node": node, "name": name, "end": "frozen", "reason": reason, "time": time.time()}
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(fields))
    os.replace(temporary, path)


def main(words: list[str]) -> int:
    beats, pid, seconds, path, node, name = words
    handle = os.pidfd_open(int(pid))
    if os.getppid() != int(pid) or not watch(int(beats), float(seconds)):
        return 0
    why = f"the agent of {name} stood still for {float(seconds):.0f} s ({process_state(int(pid))}) and was killed"
    sys.stderr.write(f"orch-watchdog: {why}\n")
    reporter = threading.Thread(target=report, args=(Path(path), int(node), name, why), daemon=True)
    reporter.start()
    reporter.join(REPORT_SECONDS)
    # Its fork server, ranks and writers die with it, and the job ends.
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
