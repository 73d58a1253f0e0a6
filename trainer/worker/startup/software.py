"""What a rank computes with: other versions, another device or another number of threads may give other bits."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_DRIVER = Path("/sys/module/nvidia/version")


def software(device: torch.device) -> dict[str, Any]:
    """Versions, device and settings of this process, as plain JSON; it starts nothing on the device."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda or torch.version.hip,
            "driver": _driver(),
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
            # Reading allow_tf32 raises where somebody has set this one.
            "matmul": getattr(torch.backends.cuda.matmul, "fp32_precision", None),
        }
    return found


def _driver() -> str | None:
    """The version of NVIDIA's kernel module; torch does not tell it."""
    try:
        return _DRIVER.read_text().strip()
    except OSError:
        return None


def differences(before: Any, now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What is not as it was: name -> [before, now]; nothing where it was not written down."""
    if not isinstance(before, Mapping):
        return {}
    return {
        name: [before.get(name), now.get(name)] for name in sorted({*before, *now}) if before.get(name) != now.get(name)
    }
