"""What a rank computes with: other versions, another device or another number of threads may give other bits."""

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_DRIVER = Path("/sys/module/nvidia/version")
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_IDENTITY = frozenset({"vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part"})
_CPU_FLAGS = frozenset({"flags", "Features"})
_ARITHMETIC = re.compile(r"(sse|ssse|avx|amx|fma|f16c|asimd|sve|sme|bf16|i8mm)")
_KERNEL_SETTINGS = re.compile(r"(ONEDNN_|DNNL_|MKL_|ATEN_CPU_CAPABILITY$)")
"""Variables by which MKL, oneDNN and torch choose the kernels of a CPU."""
_RECORDED_LATER = frozenset({"cpu_model", "kernel_settings"})
"""Names that checkpoints of earlier releases lack, which is no difference."""


def software(device: torch.device) -> dict[str, Any]:
    """Versions, device and settings of this process, as plain JSON; it starts nothing on the device."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cpu":
        found |= {"cpu_model": _cpu_model(), "kernel_settings": _kernel_settings()}
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


def _cpu_model() -> str | None:
    """Return the CPU's name and a digest of its model and instruction sets, by which libraries choose kernels."""
    try:
        lines = _CPU_INFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return None
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    identity = sorted(f"{name}={value}" for name, value in fields.items() if name in _CPU_IDENTITY)
    flags = sorted(flag for name in _CPU_FLAGS for flag in fields.get(name, "").split() if _ARITHMETIC.match(flag))
    digest = hashlib.sha256("\n".join([*identity, *flags]).encode()).hexdigest()[:12]
    return f"{fields.get('model name', platform.machine())} {digest}"


def _kernel_settings() -> str:
    return " ".join(sorted(f"{name}={value}" for name, value in os.environ.items() if _KERNEL_SETTINGS.match(name)))


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
    names = {*before, *now} - (_RECORDED_LATER - {*before})
    return {name: [before.get(name), now.get(name)] for name in sorted(names) if before.get(name) != now.get(name)}
