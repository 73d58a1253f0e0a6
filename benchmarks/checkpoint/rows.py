"""The rows of the table: limits, targets, and the functions that measure them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STRETCH, MUST, MISSED, NO_MUST = "stretch", "must", "MISSED", "-"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Folder and number of rounds of one row; `scale` is the share of the full state sets."""

    folder: Path
    rounds: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of one row: seconds or counts, less is better; `peers` are other programs at the same task.

    `demands` are further conditions of the row: (description, whether it holds).
    """

    ours: float
    limit: float
    unit: str = "s"
    peers: dict[str, float] = field(default_factory=dict)
    cache: str = "-"
    threads: int = 1
    rounds: int
    demands: tuple[tuple[str, bool], ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table. The ratio is ours / limit if it may be at most `must`, else limit / ours."""

    name: str
    text: str
    limit: str
    must: float | None
    stretch: float | None
    at_most: bool
    where: str
    """`module:function` of this package; the function takes a Setting and the arguments below."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def measure(self, setting: Setting) -> Measured:
        module, _, function = self.where.partition(":")
        # Late import: torch is loaded in the measuring process, not in the printing one.
        measure: Callable[..., Measured] = getattr(importlib.import_module(f"benchmarks.checkpoint.{module}"), function)
        return measure(setting, **self.arguments)

    def ratio(self, value: float, limit: float) -> float:
        return value / limit if self.at_most else limit / value

    def verdict(self, measured: Measured) -> str:
        """Return the best target that the row meets."""
        if self.must is None or self.stretch is None:
            return NO_MUST
        if not all(holds for _, holds in measured.demands):
            return MISSED
        ratio = self.ratio(measured.ours, measured.limit)
        for name, bound in ((STRETCH, self.stretch), (MUST, self.must)):
            if (ratio <= bound) if self.at_most else (ratio >= bound):
                return name
        return MISSED


def _row(
    name: str, text: str, limit: str, bounds: tuple[float, float] | None, where: str, arguments: dict[str, Any]
) -> Row:
    """Make a row; `bounds` are must and stretch, and a stretch below the must means that less is better."""
    must, stretch = bounds or (None, None)
    at_most = must is not None and stretch is not None and stretch < must
    return Row(
        name=name, text=text, limit=limit, must=must, stretch=stretch, at_most=at_most, where=where, arguments=arguments
    )


_COPY = "memcpy into a warm buffer"
_WRITE = "raw write + fsync, same bytes"
_READ = "raw read, same bytes"
_NEEDED = "bytes needed"
_RATE, _STEADY, _DISK = "rate without a save", "steady save", "verified load from disk, cold"
BIG, SMALL = {"set_name": "BIG"}, {"set_name": "SMALL"}
COLD, WARM = {"cold": True}, {"cold": False}

ROWS = (
    _row("stall-block-big", "stall, block, BIG", _COPY, (1.25, 1.1), "stall:block", BIG),
    _row("stall-block-small", "stall, block, SMALL", _COPY, (1.5, 1.25), "stall:block", SMALL),
    _row("stall-lazy-big", "stall, lazy, BIG", _COPY, (0.2, 0.05), "stall:lazy", BIG),
    _row("stall-lazy-small", "stall, lazy, SMALL", _COPY, (0.2, 0.05), "stall:lazy", SMALL),
    _row("trainer-rate", "step rate while saving, SMALL", _RATE, (0.90, 0.97), "rate:while_saving", {}),
    _row("save-big", "save, staged to committed, BIG", _WRITE, (0.90, 0.97), "saving:save", BIG),
    _row("save-small", "save, staged to committed, SMALL", _WRITE, (0.90, 0.97), "saving:save", SMALL),
    _row("whole-save-big", "save, call to committed, BIG", _WRITE, None, "saving:whole", BIG),
    _row("whole-save-small", "save, call to committed, SMALL", _WRITE, None, "saving:whole", SMALL),
    _row("first-save-big", "first save after start, BIG", _STEADY, (1.5, 1.1), "first:first", BIG),
    _row("first-save-small", "first save after start, SMALL", _STEADY, (1.5, 1.1), "first:first", SMALL),
    _row("verify-cold", "verify level 2, cold", _READ, (0.95, 0.98), "verifying:level_2", COLD),
    _row("verify-warm", "verify level 2, warm", _READ, (0.8, 0.9), "verifying:level_2", WARM),
    _row("load-cold-big", "verified load, cold, BIG", _READ, (0.85, 0.95), "loading:load", COLD | BIG),
    _row("load-cold-small", "verified load, cold, SMALL", _READ, (0.85, 0.95), "loading:load", COLD | SMALL),
    _row("load-warm-big", "verified load, warm, BIG", _READ, (0.85, 0.95), "loading:load", WARM | BIG),
    _row("load-warm-small", "verified load, warm, SMALL", _READ, (0.85, 0.95), "loading:load", WARM | SMALL),
    _row("reshard-rows", "reshard dp2 -> tp4, rows", _NEEDED, (1.1, 1.02), "ranks:reshard", {"turn": "rows"}),
    _row("reshard-rows-back", "reshard tp4 -> dp2, rows", _NEEDED, (1.1, 1.02), "ranks:reshard", {"turn": "rows-back"}),
    _row("reshard-columns", "reshard dp2 -> tp4, columns", _NEEDED, (1.3, 1.02), "ranks:reshard", {"turn": "columns"}),
    _row(
        "reshard-columns-back", "reshard tp4 -> dp2, columns", _NEEDED, (1.3, 1.02), "ranks:reshard",
        {"turn": "columns-back"},
    ),
    _row("replicated-load", "replicated load, 4 ranks", "bytes once", (1.1, 1.01), "ranks:replicated", {}),
    _row("descriptors", "descriptors, ulimit -n 256, SMALL", "-", (4, 2), "descriptors:hand_off", {}),
    _row("memory-tier", "restart in place from RAM", _DISK, (0.5, 0.3), "memory_tier:restart", {}),
)  # fmt: skip
