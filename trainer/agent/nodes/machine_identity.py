"""Which machine this is: simulated nodes share one, and must not be held against each other."""

from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def identity() -> str:
    """The same for all processes of one running kernel; empty where the kernel does not say."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
