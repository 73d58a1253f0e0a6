"""Where the time of a step went on this rank, the memory that it needed, and which share of the device was used."""

import resource
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from trainer.contract.config import JobConfig
from trainer.contract.model_costs.model_flops import peak_flops
from trainer.contract.ranks.progress import SECTIONS
from trainer.worker.reporting.rank_comparison import RankComparison
from trainer.worker.reporting.traffic import TrafficMeter

_NOTHING: Mapping[str, float] = MappingProxyType({})


class StepFigures:
    """Makes the part of a line of steps.jsonl that says what a step has cost."""

    def __init__(
        self,
        config: JobConfig,
        device: torch.device,
        world_size: int,
        flops_per_step: float | None,
        meter: TrafficMeter,
        comparison: RankComparison,
    ) -> None:
        """`flops_per_step`: model FLOPs of one optimizer step over all ranks, if the workload knows them."""
        self._device, self._world_size, self._flops = device, world_size, flops_per_step
        self._peak = 1e12 * config.train.peak_tflops or _peak(device, config.train.dtype)
        self._meter, self._bytes, self._tells_bytes = meter, dict[str, int](), False
        self._comparison, self._seconds_before = comparison, 0.0

    def step_ended(self) -> None:
        """Call when the collectives of a step have been given to torch."""
        if (found := self._meter.step_ended()) is not None:
            self._bytes, self._tells_bytes = found, True

    def of(
        self, step: int, seconds: float, stall: float, sections: Mapping[str, float],
        exposed: Mapping[str, float] = _NOTHING,
    ) -> dict[str, Any]:  # fmt: skip
        """`seconds` of the step, of which saves took `stall`; `sections`: this rank's own work in each of them.

        `exposed`: seconds of communication that nothing hid, measured in the step before: in `reductions`, and in a
        pipeline in `receives` and `sends` between stages; `receives` as a share of that step are told as `bubble`. What
        is left of this step is `waiting`: in these, in collectives within the passes, and for the host. All ranks call
        it for the same steps: some compare the ranks.
        """
        work = {name: round(value, 6) for name, value in sections.items()}
        waiting, memory = max(0.0, seconds - stall - sum(sections.values())), self._memory()
        told = {"work": work, "waiting": round(waiting, 6), "memory": memory, **self._speed(seconds)}
        told["exposed"] = {name: round(value, 6) for name, value in exposed.items()}
        compared = {**sections, "waiting": waiting, **exposed}
        before, self._seconds_before = self._seconds_before, seconds
        if "receives" in exposed:
            told["bubble"] = compared["bubble"] = round(exposed["receives"] / before, 4) if before > 0 else 0.0
        if ranks := self._comparison.add(step, compared, memory):
            told["ranks"] = ranks
        # Not in every line: it is the same for all steps of a generation.
        if self._bytes and (self._tells_bytes or ranks):
            told["bytes"], self._tells_bytes = self._bytes, False
        return told

    def _memory(self) -> dict[str, int]:
        """Peaks since the rank began, in bytes; `resident` is that of the process."""
        if self._device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self._device),
                "reserved": torch.cuda.max_memory_reserved(self._device),
            }
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}

    def _speed(self, seconds: float) -> dict[str, float]:
        if self._flops is None or seconds <= 0:
            return {}
        per_device = self._flops / seconds / self._world_size
        mfu = {} if not self._peak else {"mfu": round(per_device / self._peak, 4)}
        return {"tflops_per_rank": round(per_device / 1e12, 6), **mfu}


def section_seconds(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Seconds by the name of the section."""
    return {phase.name.lower(): value * 1e-9 for phase, value in zip(SECTIONS, nanoseconds, strict=True)}


def _peak(device: torch.device, dtype: str) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
