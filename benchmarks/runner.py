"""Command line, table and JSON of every benchmark, and the comparison of sides that take turns.

A row compares orch with a limit or with other programs in one run. The table shows the median of its rounds, the
interval of that median, the targets, and the reason for a known miss. The exit code is 1 if a row misses its must or
fails.
"""

import argparse
import fnmatch
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")
STRETCH, MUST, MISSED, FAILED, NO_MUST, TOO_FEW = "stretch", "must", "MISSED", "FAILED", "-", "too few"
LIMIT, OURS = "limit", "ours"
LEAST_ROUNDS = 7
_UNITS = {"us": (1e6, " us", 1), "%": (100.0, " %", 1), "x": (1.0, " x", 3), "MiB": (2.0**-20, " MiB", 1)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table. Lower is better if the stretch is below the must; otherwise, higher is better."""

    name: str
    text: str
    must: float | None = None
    stretch: float | None = None
    unit: str = "x"
    source: Any = None
    """Source of the figure in the benchmark; the runner does not use it."""
    by_interval: bool = False
    """Missed only if the whole interval is beyond the must; needs at least 7 rounds."""
    reason: str = ""
    """Known reason for a miss, printed only if the row misses."""

    @property
    def at_least(self) -> bool:
        return self.must is not None and self.stretch is not None and self.stretch > self.must

    def verdict(self, value: float) -> str:
        """Return the best target that the value meets."""
        for name, bound in ((STRETCH, self.stretch), (MUST, self.must)):
            if bound is not None and (value >= bound if self.at_least else value <= bound):
                return name
        return NO_MUST if self.must is None else MISSED


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row's figure for each round, infinite for rounds without one; `others` are the figures of other programs."""

    values: Sequence[float]
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    """Seconds or counts behind the figure, keyed by name."""
    measured_unit: str = "s"
    demands: Sequence[str] = ()
    """Further conditions that the row does not meet."""
    notes: Sequence[str] = ()
    problems: Sequence[str] = ()
    """Errors that ended one of our rounds; any of them makes the whole row FAILED."""


Measure = Callable[[Sequence[Row], argparse.Namespace], Iterator[tuple[Row, Result]]]


def run_table(
    name: str,
    text: str | None,
    rows: Sequence[Row],
    measure: Measure,
    *,
    rounds: int = LEAST_ROUNDS,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """Measure the rows that the command line selects, and print the table or JSON; return the exit code."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="row names or patterns, separated by commas")
    parser.add_argument("--rounds", type=int, default=rounds, help="at least 7 for figures worth keeping")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder for its files")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="only list the row names")
    for flag, settings in (options or {}).items():
        parser.add_argument(flag, **settings)
    chosen = parser.parse_args()
    selected = [row for row in rows if any(fnmatch.fnmatch(row.name, part) for part in chosen.rows.split(","))]
    if chosen.list or not selected:
        print("\n".join(row.name for row in rows))
        return 0 if chosen.list else 2
    report = {"benchmark": name, **machine(chosen.folder), "rounds": chosen.rounds, "rows": []}
    output = sys.stderr if chosen.json else sys.stdout
    widths = (max(len(row.text) for row in rows), 9, 18, 9, 9, 7, 6)
    head = ("row", "figure", "95 % interval", "must", "stretch", "verdict", "n")
    print(_describe_machine(report), "", _align((*head, "measured; others"), widths), sep="\n", file=output, flush=True)
    notes = []
    for row, result in measure(selected, chosen):
        judged = judge(row, result)
        report["rows"].append(judged)
        notes += _notes(row, judged)
        print(_align(_cells(row, judged), widths), file=output, flush=True)
    print("", *dict.fromkeys(notes), sep="\n", file=output)
    if chosen.json:
        print(json.dumps(report))
    return int(any(row["verdict"] in (MISSED, FAILED) for row in report["rows"]))


def judge(row: Row, result: Result) -> dict[str, Any]:
    """Return the result with its median, interval and verdict. A round without a figure makes the row FAILED."""
    values = sorted(result.values)
    good = sum(map(math.isfinite, values))
    figure, (low, high) = (statistics.median(values), interval(values)) if values else (math.inf, (math.inf, math.inf))
    verdict = row.verdict((high if row.at_least else low) if row.by_interval else figure)
    if row.by_interval and len(values) < LEAST_ROUNDS:
        verdict = TOO_FEW
    if result.demands:
        verdict = MISSED
    if result.problems or not values or good < len(values):
        verdict = FAILED
    fixed = {"row": row.name, "text": row.text, "must": row.must, "stretch": row.stretch, "unit": row.unit}
    found = {"figure": figure, "low": low, "high": high, "good": good, "rounds": len(values), "verdict": verdict}
    return fixed | found | asdict(result) | {"reason": row.reason if verdict == MISSED else ""}


def _cells(row: Row, judged: Mapping[str, Any]) -> tuple[str, ...]:
    measured = [f"{name} {format_value(value, judged['measured_unit'])}" for name, value in judged["measured"].items()]
    others = [f"{name} {_describe_other(found, row.unit)}" for name, found in judged["others"].items()]
    low, high, figure = (format_value(judged[key], row.unit) for key in ("low", "high", "figure"))
    sign = ">=" if row.at_least else "<="
    bounds = ["-" if bound is None else sign + format_value(bound, row.unit) for bound in (row.must, row.stretch)]
    count = str(judged["rounds"])
    if judged["good"] < judged["rounds"]:
        count = f"{judged['good']} of {count}"
    last = "; ".join([", ".join(measured), *others]).strip("; ")
    return (row.text, figure, f"{low} - {high}", *bounds, judged["verdict"], count, last)


def _describe_other(found: Sequence[float], unit: str) -> str:
    good = sum(map(math.isfinite, found))
    count = "" if len(found) == good == 1 else f" (n = {good} of {len(found)})"
    return format_value(statistics.median(found), unit) + count


def _notes(row: Row, judged: Mapping[str, Any]) -> list[str]:
    parts = [*judged["notes"], *(f"not met: {demand}" for demand in judged["demands"])]
    if judged["reason"]:
        parts.append(f"missed because {judged['reason']}")
    return [f"{row.text}: {part}" for part in (*parts, *judged["problems"])]


def format_value(value: float, unit: str) -> str:
    if math.isinf(value):
        return "never"
    if unit == "s":
        return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"
    factor, name, digits = _UNITS.get(unit, (1.0, "", 0))
    return f"{value * factor:.{digits}f}{name}" if unit in _UNITS else f"{value:g}"


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *padded, cells[-1]]).rstrip()


def machine(folder: Path) -> dict[str, Any]:
    """Return the processor, the file system of `folder`, versions and the load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()),
        "file_system": max(inside, key=lambda mount: len(mount[1]))[2],
        "torch": version("torch"), "python": platform.python_version(), "load": os.getloadavg()[0],
    }  # fmt: skip


def _describe_machine(report: Mapping[str, Any]) -> str:
    return (
        f"{report['cores']} cores ({report['cpu']}), {report['file_system']}, torch {report['torch']}, Python "
        f"{report['python']}, load before {report['load']:.2f}; medians of n rounds, sides in turn"
    )


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return each side's times in `rounds` rounds, in seconds, after a warm-up round.

    A side returns the seconds that one call took. The order is limits, ours, limits (A/B/A), then the others; every
    second round runs in the opposite order.
    """
    limits = [name for name in sides if name.startswith(LIMIT)]
    order = [*limits, OURS, *limits, *(name for name in sides if name not in (*limits, OURS))]
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            times[name].append(sides[name]())
    return times


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest symmetric pair of order statistics that contains the median in 95 of 100 cases."""
    count, outside, place = len(ordered), 0.0, 0
    while place < count // 2:
        outside += 2 * math.comb(count, place) / 2**count
        if outside > 0.05:
            break
        place += 1
    first = max(0, place - 1)
    return ordered[first], ordered[count - 1 - first]


class NotInTimeError(Exception):
    """The awaited event did not happen in time."""


def until(look: Callable[[], Found | None], seconds: float, what: str) -> Found:
    """Return the first result of `look` that is not None. Raises NotInTimeError.

    Timings come from the programs' own records, never from this polling.
    """
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if (found := look()) is not None:
            return found
        time.sleep(0.1)
    raise NotInTimeError(f"{what}: not within {seconds:.0f} s")


def run_in_process(module: str, function: str, *arguments: Any) -> "subprocess.Popen[str]":
    """Start a function in a new process; its benchmark module must call `serve`. `answer` returns the result."""
    words = [sys.executable, "-m", f"benchmarks.{module}", function, json.dumps(arguments, default=str)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process: "subprocess.Popen[str]", seconds: float) -> Any:
    """Return the function's result. Raises RuntimeError if it failed or took too long."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took longer than {seconds:.0f} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError((errors.strip() or f"exit code {process.returncode}")[-2000:])
    return json.loads(output.splitlines()[-1])


def serve(functions: Mapping[str, Any]) -> None:
    """Run the function that `run_in_process` named, with a folder as its first argument, and print its result."""
    folder, *arguments = json.loads(sys.argv[2])
    found = functions[sys.argv[1]](Path(folder), *arguments)
    print(json.dumps(asdict(found) if isinstance(found, Result) else found), flush=True)
    # gloo's threads may still be releasing tensors, and interpreter shutdown would end them noisily.
    os._exit(0)
