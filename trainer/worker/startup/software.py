"""Every rank's software, and how it differs from a checkpoint's software."""

import hashlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
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
"""Variables that affect which CPU kernels MKL, oneDNN and torch choose."""


def software(device: torch.device) -> dict[str, Any]:
    """Return this process's versions, device and settings as plain JSON, without starting work on the device."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "text_hash": f"{hash('orch') & 0xFFFFFFFF:08x}",  # depends on PYTHONHASHSEED, like the order of string sets
    }
    if device.type == "cpu":
        found |= {"cpu_model": _cpu_model(), "kernel_settings": _kernel_settings()}
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda or torch.version.hip,
            "driver": _read(_DRIVER),  # torch does not report it
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
            # If this has been set, reading allow_tf32 raises.
            "matmul": getattr(torch.backends.cuda.matmul, "fp32_precision", None),
        }
    return found


def _cpu_model() -> str | None:
    """Return the CPU's name and a digest of its model and instruction sets, which decide the choice of kernels."""
    if (text := _read(_CPU_INFO)) is None:
        return None
    lines = text.partition("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    identity = sorted(f"{name}={value}" for name, value in fields.items() if name in _CPU_IDENTITY)
    flags = sorted(flag for name in _CPU_FLAGS for flag in fields.get(name, "").split() if _ARITHMETIC.match(flag))
    digest = hashlib.sha256("\n".join([*identity, *flags]).encode()).hexdigest()[:12]
    return f"{fields.get('model name', platform.machine())} {digest}"


def _kernel_settings() -> str:
    return " ".join(sorted(f"{name}={value}" for name, value in os.environ.items() if _KERNEL_SETTINGS.match(name)))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the changed values as name -> [before, now]."""
    names = sorted({*before, *now})
    return {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}


FIRST = "software"
"""Key in a checkpoint's facts for the software of rank 0."""
RANKS = "rank_software"
"""Key in a checkpoint's facts for the software of other ranks. `others` has the distinct sets that differ from rank
0's. `ranks` has the number of each rank's set: 0 for rank 0's, n for `others[n - 1]`. Both are empty if all ranks are
equal."""


def software_facts(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a checkpoint's facts about the software of all ranks, with each distinct set once."""
    distinct: list[Mapping[str, Any]] = []
    for each in of_ranks:
        if each not in distinct:
            distinct.append(each)
    numbers = [distinct.index(each) for each in of_ranks] if len(distinct) > 1 else []
    return {FIRST: dict(of_ranks[0]), RANKS: {"others": [dict(each) for each in distinct[1:]], "ranks": numbers}}


def changed_software(
    saved: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[Any]], dict[str, int]]:
    """Return how the software of any rank differs from that in a checkpoint with the facts `saved`.

    The first dict maps a name to [before, now] on the first rank that differs. The second maps it to that rank's number
    unless it is 0. New ranks in a larger world are compared with the saved rank 0. Imported checkpoints have no such
    facts, so nothing differs.
    """
    changes: dict[str, list[Any]] = {}
    ranks: dict[str, int] = {}
    if FIRST not in saved:
        return changes, ranks
    others, numbers = saved[RANKS]["others"], saved[RANKS]["ranks"]
    for rank, now in enumerate(of_ranks):
        number = numbers[rank] if rank < len(numbers) else 0
        for name, pair in differences(others[number - 1] if number else saved[FIRST], now).items():
            if name not in changes:
                changes[name] = pair
                if rank:
                    ranks[name] = rank
    return changes, ranks
