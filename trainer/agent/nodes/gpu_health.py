"""PURE: what the driver's own report says against a node's GPUs. Tested with reports made by hand only."""

import re
from collections import Counter
from collections.abc import Iterator
from xml.etree import ElementTree

_BRAKES = {
    "hw_slowdown": "the hardware slows it down",
    "hw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "its power supply brakes it",
    "sw_thermal_slowdown": "the driver slows it down because of heat",
}
"""Reasons for low clocks that an idle GPU has no business with."""
_BRAKE_TAGS = ("clocks_event_reason_", "clocks_throttle_reason_")
"""What drivers call them; the first since 535."""
_LINKS_OF = re.compile(r"^GPU (\d+):")
_LINK = re.compile(r"^\s+Link \d+: (\S+)")


def complaints(report: str) -> list[str]:
    """What `nvidia-smi -q -x` reports of broken GPUs, in words; nothing when it cannot be understood.

    An unknown driver's report is no evidence against a node; GPUs that are missing are counted elsewhere.
    """
    try:
        gpus = ElementTree.fromstring(report).findall("gpu")
    except ElementTree.ParseError:
        return []
    return [f"GPU {number} {words}" for number, gpu in enumerate(gpus) for words in _of(gpu)]


def _of(gpu: ElementTree.Element) -> Iterator[str]:
    errors = _uncorrected(gpu)
    if errors and not _says_what_it_needs(gpu):
        yield f"has had {errors} uncorrected memory error(s) since its driver was loaded"
    if any(_says(gpu, f"ecc_errors/{sums}/sram_threshold_exceeded") == "yes" for sums in ("volatile", "aggregate")):
        yield "has had more errors in its SRAM than its maker allows"
    if _says(gpu, "retired_pages/pending_retirement") == "yes":
        yield "needs a reset before broken pages of its memory are retired"
    if _says(gpu, "remapped_rows/remapped_row_failure") == "yes":
        yield "has no spare rows left for broken memory"
    if _says(gpu, "remapped_rows/remapped_row_pending") == "yes":
        yield "needs a reset before broken rows of its memory are replaced"
    if _says(gpu, "gpu_recovery_action") not in ("", "none", "n/a"):
        yield f"asks for recovery: {_says(gpu, 'gpu_recovery_action')}"
    for brake, words in _BRAKES.items():
        if any(_says(gpu, f"*/{tag}{brake}") == "active" for tag in _BRAKE_TAGS):
            yield f"is throttled: {words}"


def _uncorrected(gpu: ElementTree.Element) -> int:
    """Errors since the driver was loaded; drivers count them by kind of memory, older ones in one sum."""
    counts = [
        int(item.text)
        for item in gpu.findall("ecc_errors/volatile/*")
        if "uncorrectable" in item.tag and item.text and item.text.strip().isdigit()
    ]
    return sum(counts)


def _says_what_it_needs(gpu: ElementTree.Element) -> bool:
    """Whether the report itself tells a contained or remapped error from one that needs a reset, as of Ampere."""
    return _says(gpu, "gpu_recovery_action") not in ("", "n/a") or _says(
        gpu, "remapped_rows/remapped_row_pending"
    ) not in ("", "n/a")


def _says(gpu: ElementTree.Element, path: str) -> str:
    return (gpu.findtext(path) or "").strip().lower()


def lost_links(report: str) -> str:
    """What `nvidia-smi nvlink --status` says of a GPU with fewer links up than its neighbours; empty when none has.

    How many links a GPU should have depends on the machine. Bridges join pairs: a GPU without one has no link up, and
    the two of a narrower one have as many as each other. Neither is a loss.
    """
    up: dict[int, int] = {}
    gpu = -1
    for line in report.splitlines():
        if (head := _LINKS_OF.match(line)) is not None:
            gpu = int(head.group(1))
            up[gpu] = 0
        elif (link := _LINK.match(line)) is not None and gpu >= 0:
            up[gpu] += link.group(1) not in ("<inactive>", "0.000", "0")
    most, alike = max(up.values(), default=0), Counter(up.values())
    lost = {gpu: count for gpu, count in up.items() if 0 < count < most and alike[count] == 1}
    return "; ".join(f"GPU {gpu} has {count} of {most} NVLinks up" for gpu, count in lost.items())
