"""What a rank computes with: other versions, another device or another number of threads may give other bits."""

import platform
from collections.abc import Mapping
from typing import Any

import torch


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
            "cuda": torch.version.cuda,
            "driver": torch._C._cuda_getDriverVersion(),
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return found


def differences(before: Any, now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What is not as it was: name -> [before, now]; nothing where it was not written down."""
    if not isinstance(before, Mapping):
        return {}
    return {
        name: [before.get(name), now.get(name)] for name in sorted({*before, *now}) if before.get(name) != now.get(name)
    }
