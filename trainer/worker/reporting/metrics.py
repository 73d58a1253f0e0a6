"""Records of a training rank: metrics, step figures, work log and events."""

import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from checkpointing.storage.durable import dump_line, write_durably
from trainer.costs.model_flops import peak_flops
from trainer.parallel.apply.gradient_buckets import own_part
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.save_trouble import SaveTrouble
from trainer.protocol.logs.line_file import LineFile, Lines
from trainer.protocol.messages.ranks import RankSpec
from trainer.protocol.rank_progress.progress import SECTIONS
from trainer.protocol.run_dir import AttemptDir
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.reporting.traffic import TrafficMeter

EVERY = 50
"""Steps between two comparisons. A comparison is one all-gather of a few numbers in host memory."""
Gather = Callable[[Sequence[float]], list[list[float]]]


class RankComparison:
    """Comparison of figures between all ranks, averaged over EVERY steps. Collective."""

    def __init__(self, gather: Gather | None = None) -> None:
        """`gather` returns the rows of all ranks in order. The default uses torch's default group."""
        self._gather = gather or _all_gather
        self._sums: dict[str, float] = {}
        self._steps = 0

    def add(self, step: int, seconds: Mapping[str, float], memory: Mapping[str, int]) -> dict[str, Any]:
        """Add a step and return the comparison, which is empty except at every EVERYth step of the run.

        `seconds` holds times to average, and `memory` holds peaks in bytes. All ranks must add the same steps with the
        same names.
        """
        for name, value in seconds.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._steps += 1
        if step % EVERY:
            return {}
        own = {name: total / self._steps for name, total in self._sums.items()}
        self._sums, self._steps = {}, 0
        names = [*own, *memory]
        rows = self._gather([*own.values(), *map(float, memory.values())])
        return {name: _summarize([row[at] for row in rows]) for at, name in enumerate(names)}


def _summarize(values: Sequence[float]) -> dict[str, Any]:
    most = max(values)
    return {
        "least": round(min(values), 6), "median": round(median(values), 6), "most": round(most, 6),
        "rank": values.index(most),
    }  # fmt: skip


def _all_gather(row: Sequence[float]) -> list[list[float]]:
    mine = torch.tensor(row, dtype=torch.float64, device="cpu")
    rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [each.tolist() for each in rows]


def expert_loads(step: int, loads: Sequence[float], layers: int) -> dict[str, Any]:
    """Return the minimum, median and maximum tokens per expert, relative to the mean of the expert's layer.

    `loads` are totals over all ranks, layer by layer. The result is empty except at every EVERYth step of the run.
    """
    if step % EVERY or not loads or not sum(loads):
        return {}
    experts = len(loads) // layers
    rows = [loads[first : first + experts] for first in range(0, len(loads), experts)]
    shares = [load * experts / sum(row) for row in rows for load in row]
    most = max(shares)
    layer, expert = divmod(shares.index(most), experts)
    return {
        "experts": {
            "least": round(min(shares), 4), "median": round(median(shares), 4), "most": round(most, 4),
            "layer": layer, "expert": expert,
        }
    }  # fmt: skip


def held_states(model: nn.Module, optimizer: torch.optim.Optimizer, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the sizes in bytes of this rank's parameters, gradients and optimizer state. Call this after a step.

    `on_host` lists the kinds that `parallel.fsdp.offload` keeps in host memory.
    """
    weights = list(model.parameters())
    state = (value for held in optimizer.state.values() for value in held.values() if isinstance(value, torch.Tensor))
    return {
        "parameters": _bytes(weights),
        "gradients": _bytes(weight for weight in weights if weight.requires_grad),
        "optimizer": _bytes(state),
        "on_host": list(parallel.fsdp.on_host),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(own_part(tensor).nbytes for tensor in tensors)


_NOTHING: Mapping[str, float] = MappingProxyType({})


class StepFigures:
    """Builds the cost figures for a line of steps.jsonl."""

    def __init__(
        self,
        config: JobConfig,
        device: torch.device,
        world_size: int,
        flops_per_step: float | None,
        meter: TrafficMeter,
        comparison: RankComparison,
    ) -> None:
        """`flops_per_step` is the model FLOPs of one optimizer step over all ranks, or None if unknown."""
        self._device, self._world_size, self._flops = device, world_size, flops_per_step
        self._peak = 1e12 * config.train.peak_tflops or _peak(device, config.train.dtype)
        self._meter, self._bytes, self._bytes_due = meter, dict[str, int](), False
        self._comparison, self._seconds_before = comparison, 0.0

    def step_ended(self) -> None:
        """Record the end of a step. Call this when its collectives have been submitted to torch."""
        if (found := self._meter.step_ended()) is not None:
            self._bytes, self._bytes_due = found, True

    def build_figures(
        self, step: int, seconds: float, stall: float, sections: Mapping[str, float],
        exposed: Mapping[str, float] = _NOTHING,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the figures of a step that took `seconds`, including `stall` seconds for saves.

        `sections` holds the seconds of this rank's own work in each section. `exposed` holds the seconds of
        communication in the previous step that did not overlap with work: `reductions` and, in a pipeline, `receives`
        and `sends` between stages. `bubble` is the share of `receives` in that step. The rest of this step is `waiting`
        for communication and for the host. All ranks must call this for the same steps, because some steps compare the
        ranks.
        """
        work = {name: round(value, 6) for name, value in sections.items()}
        waiting, memory = max(0.0, seconds - stall - sum(sections.values())), self._memory()
        figures = {"work": work, "waiting": round(waiting, 6), "memory": memory, **self._throughput(seconds)}
        figures["exposed"] = {name: round(value, 6) for name, value in exposed.items()}
        compared = {**sections, "waiting": waiting, **exposed}
        before, self._seconds_before = self._seconds_before, seconds
        if "receives" in exposed:
            figures["bubble"] = compared["bubble"] = round(exposed["receives"] / before, 4) if before > 0 else 0.0
        if ranks := self._comparison.add(step, compared, memory):
            figures["ranks"] = ranks
        # Not in every line, because this is the same for all steps of a generation.
        if self._bytes and (self._bytes_due or ranks):
            figures["bytes"], self._bytes_due = self._bytes, False
        return figures

    def _memory(self) -> dict[str, int]:
        """Return this process's memory peaks in bytes."""
        if self._device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self._device),
                "reserved": torch.cuda.max_memory_reserved(self._device),
            }
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}

    def _throughput(self, seconds: float) -> dict[str, float]:
        if self._flops is None or seconds <= 0:
            return {}
        per_device = self._flops / seconds / self._world_size
        mfu = {} if not self._peak else {"mfu": round(per_device / self._peak, 4)}
        return {"tflops_per_rank": round(per_device / 1e12, 6), **mfu}


def section_seconds(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Return the seconds in each section, keyed by name."""
    return {phase.name.lower(): value * 1e-9 for phase, value in zip(SECTIONS, nanoseconds, strict=True)}


def _peak(device: torch.device, dtype: str) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


BATCH_SECONDS = 1.0
"""Lines that arrive within this many seconds of a write are written together."""
MOST_CHARACTERS = 16 << 20
"""Maximum characters queued while the file hangs. Further lines are lost."""


class LinesBehind:
    """Background writer that writes lines in order, within BATCH_SECONDS while the file responds.

    Only `flush` and `close` wait for the file. The writer thread opens the file at the first line. It calls `lost` with
    the reason when lines cannot be written.
    """

    def __init__(
        self, open_file: Callable[[], Lines], lost: Callable[[str], object], *, batch_seconds: float = BATCH_SECONDS
    ) -> None:
        self._open, self._lost, self._batch_seconds = open_file, lost, batch_seconds
        self._lines: list[str] = []
        self._characters = 0
        self._writing = self._hurry = self._closed = self._full = False
        self._gathers = False  # while it gathers lines, new ones need not wake the thread
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="orch-lines", daemon=True).start()

    def append(self, line: str) -> None:
        """Queue `line` without waiting for the file."""
        with self._news:
            full = self._characters + len(line) > MOST_CHARACTERS
            already_reported, self._full = self._full, full
            if not full:
                self._lines.append(line)
                self._characters += len(line)
                if not self._gathers:
                    self._news.notify_all()
        if full and not already_reported:
            self._lost("too many lines are queued for a hanging file; further lines are lost until it responds")

    def flush(self, seconds: float) -> bool:
        """Write all appended lines now, waiting at most `seconds`. Return whether all were written."""
        with self._news:
            self._hurry = True
            self._news.notify_all()
            return self._news.wait_for(lambda: not (self._lines or self._writing), seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Flush, and let the thread close the file after it has written the remaining lines."""
        if not self.flush(seconds):
            self._lost("the file was still hanging when the rank ended")
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _run(self) -> None:
        file: Lines | None = None
        while lines := self._next():
            try:
                file = file or self._open()
                file.append("\n".join(lines))
            except OSError as error:
                self._lost(str(error))
            with self._news:
                self._writing = False
                self._news.notify_all()
                # Many lines per second share a write; an occasional line is written immediately.
                self._gathers = True
                self._news.wait_for(lambda: self._hurry or self._closed, self._batch_seconds)
                self._gathers = False
        if file is not None:
            file.close()

    def _next(self) -> list[str]:
        with self._news:
            self._news.wait_for(lambda: self._lines or self._closed)
            lines, self._lines, self._characters = self._lines, [], 0
            self._writing = bool(lines)
            self._hurry = False
            return lines


class BestEffortLines:
    """Writes JSON lines and reports lost ones on stderr, because a full disk must not kill a training rank."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, LineFile(path)

    def write(self, fields: dict[str, Any]) -> None:
        try:
            self._file.append(dump_line(fields))
        except OSError as error:
            write_stderr(f"orch: a line of {self._path.name} is lost: {error}")

    def close(self) -> None:
        self._file.close()


WORK_LOG = "ORCH_WORK_LOG"
"""Environment variable that makes every rank write a line for every step immediately. It is for tests and for checking
a run. With many ranks, it overloads a shared file system."""
SETTLE_SECONDS = 1.0
"""Maximum seconds that a save waits for the lines of earlier steps."""


def _report_lost_steps(why: str) -> None:
    write_stderr(f"orch: lines of steps.jsonl are lost: {why}")


class Journal:
    """One rank's records in its attempt's folder. The checkpointer's thread may also call the methods."""

    def __init__(
        self, attempt: AttemptDir, spec: RankSpec, on_saves: Callable[[str, int], None] = lambda trouble, size: None
    ) -> None:
        """`on_saves` receives the reason and size when saves fail, and an empty reason when they work again."""
        self._spec, self._on_saves, self._trouble = spec, on_saves, SaveTrouble()
        self._work = BestEffortLines(attempt.work_log(spec.node_name)) if os.environ.get(WORK_LOG) else None
        self._steps = LinesBehind(lambda: LineFile(attempt.metrics), _report_lost_steps) if spec.rank == 0 else None
        self._settles = True
        self._validation = attempt.validation
        self._final = attempt.final
        self._events = EventLog(attempt.rank_events(spec.node_name), f"rank-{spec.rank:05d}", spec.attempt)
        self._events.generation = spec.generation
        self._stalls: dict[int, float] = {}
        self._stalls_lock = threading.Lock()  # training adds entries while the saver's thread removes them

    def _stamp(self) -> dict[str, Any]:
        return {"time": time.time(), "attempt": self._spec.attempt, "generation": self._spec.generation}

    def event(self, kind: EventKind, /, **data: Any) -> None:
        """Write an event. It is lost if the disk is full."""
        try:
            self._events.write(kind, **data)
        except OSError as error:
            write_stderr(f"orch: event {kind} {data} is lost: {error}")

    def checkpoint(self, kind: str, data: dict[str, Any]) -> None:
        """Write a checkpointer event. If this raises OSError, the checkpointer repeats the event."""
        if self._trouble.note(kind, data):  # comes first, because a disk too full for checkpoints may reject events
            self._on_saves(self._trouble.text, self._trouble.size)
        if kind == EventKind.CHECKPOINT_COMMITTED:
            with self._stalls_lock:
                data = {**data, "stall": self._stalls.get(data["step"], 0.0)}
                self._stalls = {step: seconds for step, seconds in self._stalls.items() if step > data["step"]}
        self._events.write(EventKind(kind), **data)

    def record_stall(self, step: int, seconds: float) -> None:
        """Record that training waited `seconds` for the save of `step`. The commit event reports the sum."""
        with self._stalls_lock:
            self._stalls[step] = self._stalls.get(step, 0.0) + seconds

    def save_interval(self, steps: int, seconds: float, reason: str) -> None:
        """Record a new interval between saves, in steps."""
        self.event(EventKind.CHECKPOINT_CADENCE, steps=steps, seconds=seconds, reason=reason)

    def log_work(self, step: int) -> None:
        """Record that this rank has trained `step`, as proof that no two processes trained it (WORK_LOG)."""
        spec = self._spec
        if self._work is not None:
            line = {"rank": spec.rank, "node": spec.node_name, "pid": os.getpid(), "step": step}
            self._work.write({**self._stamp(), **line})

    def step(self, step: int, **values: Any) -> None:
        """Write one metric line, on rank 0 only."""
        if self._steps is not None:
            self._steps.append(dump_line({**self._stamp(), "world": self._spec.world_size, "step": step, **values}))

    def settle(self) -> None:
        """Write all lines so far, so that a restart repeats none.

        Wait at most SETTLE_SECONDS, or not at all if the previous call timed out.
        """
        if self._steps is not None:
            self._settles = self._steps.flush(SETTLE_SECONDS if self._settles else 0.0)

    def record_validation(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Write one line and one event, on rank 0 only."""
        if self._spec.rank != 0:
            return
        found = {"step": step, "seconds": seconds, "metrics": dict(metrics)}
        lines = BestEffortLines(self._validation)  # the file exists only if the run validates
        lines.write({**self._stamp(), **found})
        lines.close()
        self.event(EventKind.VALIDATED, **found)

    def final(self, **values: Any) -> None:
        """Write `metrics/final.json`, the final values of a finished run."""
        write_durably(self._final, dump_line({"schema": "orch.final/1", **self._stamp(), **values}).encode())

    def close(self) -> None:
        self._events.close()
        if self._work is not None:
            self._work.close()
        if self._steps is not None:
            self._steps.close()
