"""Peaks of allocated bytes, from a trace of torch's profiler."""

import bisect
import json
from pathlib import Path
from typing import Any


def peaks(trace: Path) -> list[int]:
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("step ") and "dur" in event]
    begins = sorted(event["ts"] for event in steps)
    found, step, alive = [0] * len(begins), -1, AllocatedBytes()
    own = _OwnAllocations(events, steps[0]["tid"])
    memory = [event for event in events if event["name"] == "[memory]"]
    for event in sorted(memory, key=lambda one: one["ts"]):
        while step + 1 < len(begins) and event["ts"] >= begins[step + 1]:
            step += 1
            found[step] = alive.total
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            alive.add(address, size, counted=own.has(event))
        else:
            alive.drop(address)
        if step >= 0:
            found[step] = max(found[step], alive.total)
    return found


class AllocatedBytes:
    """Live buffers. The profiler misses frees by gloo's threads, so a new buffer at an address ends an older one."""

    def __init__(self) -> None:
        self.total = 0
        self._addresses: list[int] = []  # sorted
        self._buffers: dict[int, tuple[int, bool]] = {}

    def add(self, address: int, size: int, counted: bool) -> None:
        for gone in self._overlapping(address, address + size):
            self.drop(gone)
        bisect.insort(self._addresses, address)
        self._buffers[address] = size, counted
        self.total += size * counted

    def drop(self, address: int) -> None:
        if address in self._buffers:
            size, counted = self._buffers.pop(address)
            del self._addresses[bisect.bisect_left(self._addresses, address)]
            self.total -= size * counted

    def _overlapping(self, begin: int, end: int) -> list[int]:
        last = bisect.bisect_left(self._addresses, end)
        first = last
        while first and self._addresses[first - 1] + self._buffers[self._addresses[first - 1]][0] > begin:
            first -= 1
        return self._addresses[first:last]


class _OwnAllocations:
    """Allocations of the training thread outside its collectives."""

    def __init__(self, events: list[dict[str, Any]], thread: int) -> None:
        collectives = [event for event in events if event.get("name", "").startswith("c10d::") and "dur" in event]
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in collectives if event["tid"] == thread)
        self._thread, self._begins, self._ends = thread, [begin for begin, _ in own], [end for _, end in own]

    def has(self, event: dict[str, Any]) -> bool:
        last = bisect.bisect_right(self._begins, event["ts"]) - 1
        return event["tid"] == self._thread and (last < 0 or self._ends[last] < event["ts"])
