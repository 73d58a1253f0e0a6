"""Restore tests of one checkpoint on several layouts, in turn with raw reads of the checkpoint's own files."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.limits import BLOCK, CORES, raw_read, room
from benchmarks.checkpoint.page_cache import drop, warm
from benchmarks.recovery.job import Job
from checkpointing.tiers.catalog import Catalog
from trainer.contract.logs.line_file import work_lines
from trainer.contract.restore_test import Outcome
from trainer.contract.run_dir import RunDir

RANKS = 2
LAYOUTS = ("same", "1", "4")
DAY = 86400.0
ON_TWO_RANKS = (
    "cluster.nodes=1", f"cluster.ranks_per_node={RANKS}", "parallel.tp=1", f"parallel.dp_shard={RANKS}",
    "restore_tests.every=off",
)  # fmt: skip
_STEPS, _SAVED = 6, 3
_TRAIN_SECONDS, _TEST_SECONDS = 600.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model that is trained and saved; its checkpoint holds parameters and two moments."""

    name: str
    settings: tuple[str, ...]
    rounds: int


def _llama(dim: int, layers: int, ffn_dim: int) -> tuple[str, ...]:
    shape = (f"model.dim={dim}", f"model.layers={layers}", "model.heads=8", "model.kv_heads=4")
    return (*shape, f"model.ffn_dim={ffn_dim}", "train.batch_size=4", "train.seq_len=64", "optimizer.warmup_steps=2")


SIZES = (
    Size(name="tiny", settings=(), rounds=5),
    Size(name="small", settings=_llama(512, 3, 1408), rounds=5),
    Size(name="large", settings=_llama(1024, 7, 2816), rounds=3),
)


def measure(size: Size, folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each layout; raises RuntimeError for a test that does not restore the checkpoint.

    The files are taken out of the page cache before every test. Verification reads them first, and the restore finds
    what that has left in the cache.
    """
    settings = (*ON_TWO_RANKS, f"train.steps={_STEPS}", f"checkpoint.every={_SAVED}", *size.settings)
    with Job(folder, "local", "tiny-gpt", *settings) as job:
        job.orch("wait", job.name, seconds=_TRAIN_SECONDS)
        files = saved_files(job)
        nbytes = sum(file.stat().st_size for file in files)
        target = room(min(nbytes, 8 * BLOCK) // BLOCK * BLOCK or BLOCK)
        raw: dict[bool, list[float]] = {True: [], False: []}
        tests: dict[str, list[dict[str, Any]]] = {layout: [] for layout in LAYOUTS}
        for number in range(rounds):
            for layout in LAYOUTS if number % 2 == 0 else reversed(LAYOUTS):
                raw[True].append(raw_read(files, target, threads=CORES, cold=True))
                warm(files)
                raw[False].append(raw_read(files, target, threads=CORES, cold=False))
                drop(files)
                tests[layout].append(tested(job, layout, _SAVED)["evidence"])
        step = statistics.median(step_seconds(job))
    for layout, found in tests.items():
        yield row(size, layout, found, raw, nbytes, step)


def saved_files(job: Job) -> list[Path]:
    """Of the checkpoint that is tested."""
    catalog = Catalog(RunDir(job.path("")).checkpoints)
    entry = next(entry for entry in catalog.committed() if entry.step == _SAVED)
    return [file for file in entry.path.iterdir() if file.is_file()]


def tested(job: Job, layout: str, step: int) -> dict[str, Any]:
    """One test, with its evidence; raises RuntimeError unless it is restored."""
    words = ("ckpt", "restore-test", f"{job.name}@{step}", "--layout", layout, "--wait", "--json")
    (test,) = json.loads(job.orch(*words, seconds=_TEST_SECONDS))["data"]
    if test["verdict"] != Outcome.RESTORED:
        raise RuntimeError(f"{test['test']} on {layout}: {test['verdict']}, {test['reason']}")
    return dict(test)


def step_seconds(job: Job) -> list[float]:
    """Of rank 0, from step to step."""
    lines = [line for line in work_lines(RunDir(job.path("")).all_attempts()[-1]) if line["rank"] == 0]
    times = [float(line["time"]) for line in lines]
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def row(
    size: Size, layout: str, tests: list[dict[str, Any]], raw: dict[bool, list[float]], nbytes: int, step: float
) -> dict[str, Any]:
    """Medians of one layout; `share` is of a run of a day on RANKS ranks, of which nobody waited for the end."""

    def median(key: str) -> float:
        return statistics.median(float(test[key]) for test in tests)

    restore, cold = median("restore_seconds"), statistics.median(raw[True])
    ranks = int(tests[0]["ranks"])
    return {
        "size": size.name, "layout": layout, "ranks": ranks, "bytes": nbytes, "rounds": len(tests),
        "rto_s": median("rto_seconds"), "restore_s": restore, "restore_bytes_per_s": median("bytes_per_second"),
        "read_cold_s": cold, "read_warm_s": statistics.median(raw[False]), "reads": len(raw[True]),
        "restore_of_cold_read": restore / cold, "verify_s": median("verify_seconds"), "job_s": median("seconds"),
        "step_s": step, "share": ranks * median("seconds") / (RANKS * DAY),
        "rto_all": [test["rto_seconds"] for test in tests],
    }  # fmt: skip
