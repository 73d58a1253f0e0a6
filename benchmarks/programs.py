"""Unchanged training programs of several frameworks under faults (docs/programs.md).

    python -m benchmarks.programs [--slurm] [--only NAME ...] [--faults NAME ...] [--ranks N] [--again] [--keep]
                                  [--folder DIR]

Each cell is a run: the program is submitted as a user submits it, on simulated nodes, disturbed once from outside, and
compared with the undisturbed run of the same program. A cell takes a minute or more, so every result is written as soon
as it is known, and the other cells keep theirs. Cells that have passed are skipped unless `--again` is given. `--keep`
keeps the folders of runs that did not pass. `--slurm` starts a Slurm with four nodes on this machine and fills the
second table; it needs root.

`calm` is the undisturbed run, which comes first if it has no result yet. Frameworks outside this environment are found
in the folders of ORCH_FRAMEWORKS. `disk` needs root, because it mounts a small file system.
"""

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.program_faults import CALM, FAULTS, Fault, Strike
from benchmarks.program_run import SCRIPTS, Program, ProgramRun
from benchmarks.proof import machine
from benchmarks.runner import NotInTimeError, until
from benchmarks.submitted_run import FAILURES, BenchmarkRun
from tests.slurm.lab import SlurmLab, temporary_lab
from tests.slurm.suites import MACHINE

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "programs.md"
RECORD = PAGE.with_suffix(".json")
STEPS = 60
FAULT_STEP = 25
"""Step after which a fault is caused; programs save every ten steps."""
_START_SECONDS, _BACK_SECONDS, _END_SECONDS = 600.0, 400.0, 600.0
TORCHRUN = ("-m", "torch.distributed.run")
PROGRAMS = {
    "ddp": Program(title="plain DDP, `torch.save`", script="plain_ddp.py"),
    "torchrun": Program(title="the same, by `torchrun`", script="plain_ddp.py", launcher=TORCHRUN),
    "spawn": Program(title="`mp.spawn`, FSDP1 full shards, epochs", script="spawned_fsdp.py", nodes=1),
    "megatron": Program(
        title="Megatron's style, `--exit-signal-handler`", script="megatron_style.py",
        words=("--load", "{out}", "--save", "{out}", "--exit-signal-handler"),
    ),
    "hf": Program(title="Hugging Face Trainer", script="hf_trainer.py", package="transformers"),
    "hf-deepspeed": Program(
        title="the same, DeepSpeed JSON (ZeRO 2, CPU offload), saves per epoch", script="hf_trainer.py",
        package="deepspeed",
        words=("{out}", "--deepspeed", str(SCRIPTS / "zero2_offload.json"), "--save-strategy", "epoch"),
    ),
    "deepspeed": Program(title="DeepSpeed, ZeRO 1", script="deepspeed_loop.py", package="deepspeed"),
    "accelerate": Program(title="Accelerate, `save_state`", script="accelerate_loop.py", package="accelerate"),
    "lightning": Program(title="Lightning", script="lightning_module.py", package="lightning",
            words=("{out}", "--nodes", "{nodes}", "--devices", "{ranks}")),
    "torchtitan": Program(title="torchtitan's CheckpointManager, FSDP2", script="torchtitan_loop.py",
            package="torchtitan"),
}  # fmt: skip
"""Rows of the table, keyed by the names for `--only`."""
HEAD = """# Programs and faults

Unchanged scripts ([tests/programs](../tests/programs)) under `orch submit`, 2 nodes with 2 ranks each unless stated
otherwise, one fault each (`python -m benchmarks.programs`). They save every ten steps. [programs.json](programs.json)
has all figures, with the load of the machine.

- machine: {machine}
- cell: seconds from the fault to orch's verdict / until the program trains again; steps trained twice; whether orch
  named the right rank, node, checkpoint or cause
- two cores start four ranks of a framework in 10 to 40 seconds, which is most of the time until training

Accelerate shards with FSDP only on accelerators, so its row trains data-parallel.
"""
KINDS = {"local": "Simulated nodes on this machine", "slurm": "Real Slurm, four nodes on this machine"}
TABLE = """
## {title}

| program | {titles} | final loss equal | weights equal |
|---|{lines}---|---|
"""
Cell = dict[str, Any]


# -- cells


def run_cell(program: Program, fault: Fault, at: Path | None, lab: SlurmLab | None, *, keep: bool) -> Cell:
    """Run one program with one fault, and return its figures."""
    load, date = os.getloadavg()[0], str(datetime.datetime.now(datetime.UTC).date())
    folder = Path(tempfile.mkdtemp(dir=at, prefix="bench-programs-"))
    try:
        with _disk(folder / "disk", fault.disk) as disk:
            cell = _measure(program, fault, folder, disk / "out", lab)
    except FAILURES as problem:
        cell = {"problem": f"{type(problem).__name__}: {problem}"[:1000]}
    if passed(cell) or not keep:
        shutil.rmtree(folder, ignore_errors=True)
    if lab is not None:
        for node in lab.nodes_without_daemon():
            lab.start_node(node)
    return {**cell, "ranks": program.ranks, "steps": STEPS, "date": date, "load": round(load, 1)}


@contextmanager
def _disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size, or make an ordinary folder. Raises CalledProcessError."""
    folder.mkdir()
    if size:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        if size:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _measure(program: Program, fault: Fault, folder: Path, out: Path, lab: SlurmLab | None) -> Cell:
    command = "command=[{}]".format(",".join(f"'{word}'" for word in program.command(out, STEPS, fault.pause)))
    path = ":".join([str(SCRIPTS / "loop"), *filter(None, [os.environ.get("ORCH_FRAMEWORKS", "")])])
    settings = (
        command, f"cluster.nodes={program.nodes}", f"cluster.ranks_per_node={program.ranks}", "recovery.backoff=0.2",
        f"+env.PYTHONPATH='{path}'", "+env.PYTHONWARNINGS=ignore", "+env.HF_HUB_OFFLINE='1'", *fault.settings,
    )  # fmt: skip
    kind = "slurm" if lab else "local"
    with BenchmarkRun(folder / "user", kind, "torchrun-script", *settings, work_log=False) as job:
        run = ProgramRun(program, job, out, lab)
        try:
            until(
                lambda: run.log().step >= FAULT_STEP or None, _START_SECONDS, f"step {FAULT_STEP} of {program.script}"
            )
            before = len(run.log().starts)
            strike = fault.cause(run)
            back = _await_training(run, before) if strike.target else None
        except NotInTimeError as problem:
            shown = run.show()
            raise RuntimeError(f"{problem}; the run is {shown['state']}: {shown['reason']}") from problem
        job.orch("wait", job.name, "--timeout", str(_END_SECONDS), seconds=_END_SECONDS + 60, check=False)
        return _figures(run, strike, back)


def _await_training(run: ProgramRun, before: int) -> float:
    """Return the time of the first step after a new start."""

    def look() -> float | None:
        starts = run.log().starts
        return time.time() if len(starts) > before and starts[-1].steps else None

    return until(look, _BACK_SECONDS, "training again")


def _figures(run: ProgramRun, strike: Strike, back: float | None) -> Cell:
    log = run.log()
    found: Cell = {"state": run.state, "loss": log.loss, "weights": log.weights, "starts": len(log.starts)}
    if back is not None:
        verdicts = run.verdicts(strike.at)
        found |= {
            "target": strike.target, "noticed_s": round(verdicts[0].time - strike.at, 1) if verdicts else None,
            "back_s": round(back - strike.at, 1), "steps_lost": log.steps_lost, "named": strike.is_named(run),
            "said": [reason.replace(f"{ROOT}/", "") for reason in run.reasons(strike.at)],
        }  # fmt: skip
    return found


# -- results


Results = dict[str, dict[str, Cell]]  # keyed by program and fault


def read_results() -> dict[str, Results]:
    """Return the cells of earlier runs, keyed by kind of cluster."""
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {kind: found.get(kind, {}) for kind in KINDS}


def write_results(results: Mapping[str, Results]) -> None:
    RECORD.write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
    titles = " | ".join(fault.title for name, fault in FAULTS.items() if name != CALM)
    page = HEAD.format(machine=machine())
    for kind, title in KINDS.items():
        page += TABLE.format(title=title, titles=titles, lines="---|" * (len(FAULTS) - 1))
        page += "".join(f"{row(name, results[kind].get(name, {}))}\n" for name in PROGRAMS)
    PAGE.write_text(page)


def row(name: str, cells: Mapping[str, Cell]) -> str:
    """Return a program's line of the table."""
    program = PROGRAMS[name]
    ranks = next((cell["ranks"] for cell in cells.values()), program.ranks)
    shape = "" if (program.nodes, ranks) == (2, 2) else f" ({program.nodes} x {ranks})"
    texts = [cell_text(cells.get(fault)) for fault in FAULTS if fault != CALM]
    return (
        " | ".join([f"| {program.title}{shape}", *texts, *(_equal(cells, key) for key in ("loss", "weights"))]) + " |"
    )


def cell_text(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    if "problem" in cell:
        return "FAILED"
    named = "named" if cell["named"] else "not named"
    noticed = "never" if cell["noticed_s"] is None else f"{cell['noticed_s']:.0f} s"
    return f"{noticed} / {cell['back_s']:.0f} s, {cell['steps_lost']} lost, {named}"


def _equal(cells: Mapping[str, Cell], key: str) -> str:
    """Return how many of the disturbed runs ended as the undisturbed one did."""
    ended = [cell for name, cell in cells.items() if name != CALM and cell.get(key)]
    if not cells.get(CALM, {}).get(key) or not ended:
        return "not run"
    equal = sum(cell[key] == cells[CALM][key] for cell in ended)
    return "yes" if equal == len(ended) else f"{equal} of {len(ended)}"


def passed(cell: Cell | None) -> bool:
    return cell is not None and "problem" not in cell and cell["state"] == "SUCCEEDED" and cell.get("named", True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument(
        "--ranks", type=int, default=2, help="ranks of each of two nodes; cells of another size are dropped"
    )
    parser.add_argument("--slurm", action="store_true", help="on a real Slurm, started for these runs")
    parser.add_argument("--again", action="store_true", help="repeat cells that have passed")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that did not pass")
    parser.add_argument("--folder", type=Path, help="folder for the runs (default: the temporary folder)")
    options = parser.parse_args()
    # On SIGTERM, exit through all `with` blocks, which end everything that they started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with temporary_lab(MACHINE) if options.slurm else nullcontext() as lab:
        if lab is not None:
            os.environ.update(lab.environment())
            lab.ask("scontrol", "update", "partition=low", "gracetime=60")  # what a preempted job has for a save
        return 1 if run_cells(options, lab) else 0


def run_cells(options: argparse.Namespace, lab: SlurmLab | None) -> int:
    """Run the chosen cells, write each result, and return how many did not pass."""
    every, missed = read_results(), 0
    results = every["slurm" if lab else "local"]
    for name in options.only:
        program = PROGRAMS[name]
        if program.nodes > 1:
            program = replace(program, ranks=options.ranks)
        old = results.get(name, {}).items()
        cells = results[name] = {
            fault: cell for fault, cell in old if (cell["ranks"], cell.get("steps")) == (program.ranks, STEPS)
        }
        if program.package and not _is_installed(program.package):
            print(f"{name}: {program.package} is not installed; name its folder in ORCH_FRAMEWORKS", flush=True)
            continue
        for fault in order_faults(options.faults, cells, again=options.again):
            cells[fault] = run_cell(program, FAULTS[fault], options.folder, lab, keep=options.keep)
            write_results(every)
            missed += not passed(cells[fault])
            print(name, fault, json.dumps(cells[fault]), flush=True)
    write_results(every)
    return missed


def order_faults(faults: Sequence[str], cells: Mapping[str, Cell], *, again: bool) -> list[str]:
    """Return the faults to run; the undisturbed run comes first."""
    wanted = [fault for fault in faults if again or not passed(cells.get(fault))]
    first = [] if passed(cells.get(CALM)) and CALM not in wanted else [CALM]
    return [*first, *(fault for fault in wanted if fault != CALM)]


def _is_installed(package: str) -> bool:
    places = filter(None, os.environ.get("ORCH_FRAMEWORKS", "").split(":"))
    return importlib.util.find_spec(package) is not None or any(Path(place, package).is_dir() for place in places)


if __name__ == "__main__":
    sys.exit(main())
