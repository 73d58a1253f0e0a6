"""The checkpoint engine compared with the hardware's limit and with torch's checkpoints.

    python -m benchmarks.checkpoint [--rows PATTERN,...] [--quick] [--rounds 9] [--folder DIR] [--json] [--list]

Every row runs in its own process, with its sides interleaved, and is compared with a limit measured in the same
process: memcpy, raw reads, raw writes. The figure is ours / limit if lower is better, else limit / ours. The other
programs compared are torch's distributed checkpoints in their best configuration and torch.save. State sets: BIG
(64 x 4 MiB) and SMALL (4000 x 64 KiB). Run it on an otherwise idle machine, or the numbers are meaningless. The exit
code is 1 if a row misses its must or fails.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.runner import LEAST_ROUNDS, Result, Row, answer, run_in_process, run_table

_ROW_SECONDS = 1800
_QUICK_ROUNDS, _QUICK_SCALE = 3, 0.125

_SAVE = (
    "the limit is a write while nothing else runs; here digests and fingerprints run on the two cores that also "
    "serve the disk (without fingerprints: 0.92), and the two publications of a commit take 1.5 ms of about 65"
)
_LOAD = (
    "nothing reaches a tensor before every byte is verified, so the state is copied once more when the last byte has "
    "arrived: a seventh of the time on this machine"
)
_PLANNED = "locating 4000 tensors takes 40 ms of Python on one of the two cores that read and digest"
_CACHED = "the bytes are in the page cache, where reading is one memcpy; the copy into the tensors is a second one"
REASONS = {
    "stall-block-small": "4000 copies of 64 KiB cost 4 to 5 ms more than one copy of all their bytes, out of 13 ms on "
    "a quiet machine (1.43); they suffer first when other processes compete for memory",
    "trainer-rate": "256 MiB is read two more times during the steps, for digests and for fingerprints: with two cores "
    "that share a cache and memory, digests alone cost about a tenth of the rate, fingerprints as much again; the "
    "same loss spread over a longer save would look better and cost just as much",
    "save-big": _SAVE,
    "save-small": _SAVE,
    "load-cold-big": _LOAD,
    "load-cold-small": f"{_LOAD}; {_PLANNED}",
    "load-warm-big": _CACHED,
    "load-warm-small": f"{_CACHED}; {_PLANNED}",
    "verify-warm": "reading is one memcpy out of the page cache, and a digest is one more pass over what was copied",
}


def _row(name: str, text: str, bounds: tuple[float, float] | None, function: str, *arguments: Any) -> Row:
    must, stretch = bounds or (None, None)
    reason = REASONS.get(name, "of an unknown cause")
    unit = "" if name == "descriptors" else "x"
    source = (function, arguments)
    return Row(name=name, text=text, must=must, stretch=stretch, unit=unit, source=source, reason=reason)


ROWS = (
    _row("stall-block-big", "stall, block, BIG / memcpy", (1.25, 1.1), "stall_block", "BIG"),
    _row("stall-block-small", "stall, block, SMALL / memcpy", (1.5, 1.25), "stall_block", "SMALL"),
    _row("stall-lazy-big", "stall, lazy, BIG / memcpy", (0.2, 0.05), "stall_lazy", "BIG"),
    _row("stall-lazy-small", "stall, lazy, SMALL / memcpy", (0.2, 0.05), "stall_lazy", "SMALL"),
    _row("trainer-rate", "step rate while saving, SMALL / without", (0.90, 0.97), "rate_while_saving"),
    _row("save-big", "raw write / save, staged to committed, BIG", (0.90, 0.97), "save", "BIG", False),
    _row("save-small", "raw write / save, staged to committed, SMALL", (0.90, 0.97), "save", "SMALL", False),
    _row("whole-save-big", "raw write / save, call to committed, BIG", None, "save", "BIG", True),
    _row("whole-save-small", "raw write / save, call to committed, SMALL", None, "save", "SMALL", True),
    _row("first-save-big", "first save after start, BIG / steady save", (1.5, 1.1), "first_save", "BIG"),
    _row("first-save-small", "first save after start, SMALL / steady save", (1.5, 1.1), "first_save", "SMALL"),
    _row("verify-cold", "raw read / verify level 2, cold", (0.95, 0.98), "verify_level_2", True),
    _row("verify-warm", "raw read / verify level 2, warm", (0.8, 0.9), "verify_level_2", False),
    _row("load-cold-big", "raw read / verified load, cold, BIG", (0.85, 0.95), "load", "BIG", True),
    _row("load-cold-small", "raw read / verified load, cold, SMALL", (0.85, 0.95), "load", "SMALL", True),
    _row("load-warm-big", "raw read / verified load, warm, BIG", (0.85, 0.95), "load", "BIG", False),
    _row("load-warm-small", "raw read / verified load, warm, SMALL", (0.85, 0.95), "load", "SMALL", False),
    _row("reshard-rows", "bytes read / needed, dp2 -> tp4, rows", (1.1, 1.02), "bytes_read", "rows"),
    _row("reshard-rows-back", "bytes read / needed, tp4 -> dp2, rows", (1.1, 1.02), "bytes_read", "rows-back"),
    _row("reshard-columns", "bytes read / needed, dp2 -> tp4, columns", (1.3, 1.02), "bytes_read", "columns"),
    _row("reshard-columns-back", "bytes read / needed, tp4 -> dp2, columns", (1.3, 1.02), "bytes_read", "columns-back"),
    _row("replicated-load", "bytes read by 4 equal ranks / by one", (1.1, 1.01), "bytes_read", "replicated"),
    _row("descriptors", "descriptors, ulimit -n 256, SMALL", (4, 2), "descriptors"),
    _row("memory-tier", "restart in place from RAM / verified load, cold", (0.5, 0.3), "restart_from_memory"),
)


def measure(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Result]]:
    """Measure each row in a new process; the current process does not load torch."""
    rounds, scale = (_QUICK_ROUNDS, _QUICK_SCALE) if options.quick else (max(LEAST_ROUNDS, options.rounds), 1.0)
    for row in rows:
        function, arguments = row.source
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-checkpoint-") as folder:
            try:
                module = "checkpoint_reshard" if function == "bytes_read" else "checkpoint_rows"
                process = run_in_process(module, function, folder, rounds, scale, *arguments)
                yield row, Result(**answer(process, _ROW_SECONDS))
            except RuntimeError as error:
                yield row, Result(values=(), problems=[f"FAILED: {str(error).splitlines()[-1]}"])


if __name__ == "__main__":
    quick = {"action": "store_true", "help": "an eighth of the state, 3 rounds: a smoke test"}
    sys.exit(run_table("checkpoint", __doc__, ROWS, measure, rounds=9, options={"--quick": quick}))
