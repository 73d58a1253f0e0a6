"""The table that people read."""

from typing import Any

_HEAD = (
    "state", "layout", "RTO", "restore", "rate", "raw cold", "raw warm", "/ cold", "verify", "job", "of a day", "n",
)  # fmt: skip
_WIDTHS = (17, 14, 8, 8, 11, 8, 8, 6, 8, 7, 8, 2)


def head(report: dict[str, Any]) -> str:
    """The machine and the names of the columns."""
    machine = (
        f"{report['cores']} cores ({report['cpu']}), torch {report['torch']}, Python {report['python']}, load before "
        f"{report['load']:.2f}; runs of 2 ranks on CPUs\n"
        "medians of n tests, layouts in turn; files out of the page cache before each test; raw: the same files, read "
        "by one thread per core\n"
        "RTO: start of the job to the first step, without verifying; of a day: rank-seconds of one test as a share of "
        "those of a run of a day on 2 ranks, computed"
    )
    return "\n".join([machine, "", aligned(_HEAD), aligned(tuple("-" * width for width in _WIDTHS))])


def line(row: dict[str, Any]) -> str:
    """One size on one layout."""
    if "error" in row:
        return f"{row['size']}: FAILED: {row['error']}"
    ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
    return aligned(
        (
            f"{row['size']}, {_size(row['bytes'])}", f"{row['layout']} ({ranks})", _seconds(row["rto_s"]),
            _seconds(row["restore_s"]), f"{_size(row['restore_bytes_per_s'])}/s", _seconds(row["read_cold_s"]),
            _seconds(row["read_warm_s"]), f"{row['restore_of_cold_read']:.1f}", _seconds(row["verify_s"]),
            _seconds(row["job_s"]), f"{row['share']:.3%}", str(row["rounds"]),
        )
    )  # fmt: skip


def beside(row: dict[str, Any]) -> str:
    """The step times of a run alone and beside others."""
    if "error" in row:
        return f"step times beside a test: FAILED: {row['error']}"
    return (
        f"\nstep of a run of 2 ranks: alone {_seconds(row['alone_s'])}, beside a restore test on 2 ranks "
        f"{_seconds(row['test_s'])} ({row['test_of_alone']:.2f} x), beside 2 busy processes of the same nice value "
        f"{_seconds(row['load_s'])}; test / load {row['test_of_load']:.2f}; {row['windows']} windows each, in turn"
    )


def aligned(cells: tuple[str, ...]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells[2:], _WIDTHS[2:], strict=True)]
    return "  ".join([cells[0].ljust(_WIDTHS[0]), cells[1].ljust(_WIDTHS[1]), *padded]).rstrip()


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
