"""The state of the node itself at an incident: kernel messages, memory and pressure, GPUs."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

_MESSAGES = 500
"""Newest lines of the kernel's log."""
_FILES = (
    "loadavg",
    "uptime",
    "meminfo",
    "pressure/cpu",
    "pressure/io",
    "pressure/memory",
    "vmstat",
    "net/dev",
    "mounts",
)
_GPU = "UTILIZATION,MEMORY,ECC,TEMPERATURE,POWER,CLOCK,PERFORMANCE,PAGE_RETIREMENT,ROW_REMAPPER,PIDS"


def kernel(seconds: float) -> bytes:
    """The end of the kernel's log; raises OSError where it may not be read."""
    return b"\n".join(_say(["dmesg", "--time-format", "iso"], seconds).splitlines()[-_MESSAGES:])


def memory(seconds: float) -> bytes:
    """Load, memory and pressure stall figures, as the kernel writes them."""
    parts = []
    for name in _FILES:
        try:
            text = (Path("/proc") / name).read_text(errors="replace")
        except OSError as error:  # pressure figures are not in every kernel
            text = f"[{error.strerror}]\n"
        parts.append(f"==> /proc/{name}\n{text}")
    return "\n".join(parts).encode()


def gpus(seconds: float) -> bytes:
    """What the driver counts: errors, clocks, throttling, processes; raises OSError where there is none."""
    return _say(["nvidia-smi", "-q", "-d", _GPU], seconds)


def _say(command: list[str], seconds: float) -> bytes:
    program = shutil.which(command[0])
    if program is None:
        raise OSError(f"there is no {command[0]} here")
    try:
        done = subprocess.run(
            [program, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} took more than {seconds:.1f} s") from None
    if not done.stdout:
        raise OSError(f"{command[0]}: {done.stderr.decode(errors='replace').strip()[:500] or 'says nothing'}")
    return done.stdout


NODE_PARTS: dict[str, Callable[[float], bytes]] = {"kernel.txt": kernel, "memory.txt": memory, "gpus.txt": gpus}
