"""Forks the ranks of crash cases from a process that has imported torch: one JSON line in, one JSON line out.

A case is a generation of ranks that save without end until something is killed, and a second one that starts over
the same folder. What a rank says goes into a file, so that a kill takes nothing of it away.
"""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from checkpointing.config import CheckpointConfig, TierConfig  # noqa: E402
from checkpointing.engine.checkpointer import Checkpointer  # noqa: E402
from checkpointing.engine.collectives.group import World  # noqa: E402
from checkpointing.tiers.catalog import Catalog, Owner  # noqa: E402
from checkpointing.tiers.tier import RunTiers, resolve_tiers  # noqa: E402
from tests.checkpointing.proofs.dying import sitecustomize as dying  # noqa: E402
from tests.checkpointing.proofs.world import NONCE, marked, same, state  # noqa: E402

KEEP, WORDS = 2, 20_000
SAVES, AFTER = 12, 3
_PATIENCE_S = 20.0

DIED = "died"
"""Made in the case's folder by the killed process; says where it died."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is killed, and when: `operation` counts calls of the victim, `delay` is seconds after the first save."""

    folder: str
    victim: str
    """`rank`, `writer` or `job` (everything)."""

    ranks: int = 1
    operation: int = 0
    delay: float = 0.0


# ---- a rank


def emit(path: Path, **what: Any) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(what) + "\n")


def train(case: Case, generation: int, rank: int) -> None:
    """Restore, save until the end of the case, and say what was committed."""
    folder, reported = Path(case.folder), Path(case.folder) / f"events-{generation}-{rank}"
    torch.set_num_threads(1)
    if case.ranks > 1:
        meeting = f"file://{folder}/meeting-{generation}"
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=case.ranks, timeout=timedelta(seconds=_PATIENCE_S)
        )
    if generation == 1 and case.victim == "writer" and case.operation and rank == 0:
        os.environ[dying.VARIABLE] = f"{case.operation}:{folder / DIED}"
        os.environ["PYTHONPATH"] = f"{Path(dying.__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    made = checkpointer(folder, lambda kind, data: emit(reported, kind=kind, **data))
    made.prepare(state(0, words=WORDS))
    os.environ.pop(dying.VARIABLE, None)  # a replacement lives
    target = marked(state(0, words=WORDS))
    restored = made.restore(target)
    step = restored.step if restored else 0
    exact = restored is None or same(target, state(step, words=WORDS))
    emit(reported, kind="started", step=step, exact=exact)
    if generation == 1 and case.victim == "rank" and case.operation and rank == 0:
        dying.arm(case.operation, str(folder / DIED))
    steps = range(step + 1, step + 1 + (SAVES if generation == 1 else AFTER))
    states = {number: state(number, words=WORDS) for number in steps}
    for number in steps:
        made.save(number, states[number], {"position": number})
        if number % 3 == 0 or generation == 2 or number == steps[-2]:  # else some saves are skipped, even the last
            made.wait()
    if generation == 2:
        await_flushed(folder / "durable" / "run", steps[-1])
    made.close()
    emit(reported, kind="ended")


def await_flushed(place: Path, step: int) -> None:
    """Wait until the newest checkpoint is in the second tier."""
    deadline = time.monotonic() + _PATIENCE_S / 2
    while step not in [entry.step for entry in Catalog(place).committed_entries()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} was not copied to {place}")
        time.sleep(0.005)


def checkpointer(folder: Path, on_event: Callable[[str, dict[str, Any]], None]) -> Checkpointer:
    tiers = (TierConfig(path="run", keep=KEEP), TierConfig(path=str(folder / "durable"), keep=KEEP))
    config = CheckpointConfig(keep=KEEP, tiers=tiers)
    known = resolve_tiers(config, folder / "checkpoints", "run", "node")
    return Checkpointer(
        Owner(1, NONCE, (), lambda: True), World(), RunTiers(known, known[0].storage), on_event, config=config,
        pauses=(0.01, 0.05, 0.2, 1.0),
    )  # fmt: skip


# ---- the fork server


def forked(act: Callable[[], None], errors: Path) -> int:
    pid = os.fork()
    if pid:
        REAPED.pop(pid, None)  # numbers come again: what an earlier process of this one ended with is not this one's
        return pid
    status = 1
    try:
        os.setsid()
        descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        act()
        status = 0
    except Exception:  # noqa: BLE001 a forked child must end here, and say why
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def run(case: Case) -> dict[str, Any]:
    """Run both generations of one case; the caller looks at what is left between them."""
    ranks = start(case, 1)
    processes = [psutil.Process(pid) for pid in ranks]
    events = Path(case.folder) / "events-1-0"
    if case.delay:
        await_line(events, '"started"', ranks)
        time.sleep(case.delay)
    writers = [child for process in processes if process.is_running() for child in children(process)]
    victims = {"rank": processes[:1], "writer": writers[:1], "job": [*processes, *writers]}[case.victim]
    if case.delay and all(map(lives, victims)):
        (Path(case.folder) / DIED).write_text("at a moment")
        kill(victims)
    if case.victim == "rank" or case.victim == "job":
        await_end(ranks[:1])
        kill([*processes, *writers])
    ended = await_end(ranks)
    return {"ended": ended, "orphans": orphans(writers)}


def start(case: Case, generation: int) -> list[int]:
    errors = Path(case.folder) / f"errors-{generation}"
    return [forked(lambda rank=rank: train(case, generation, rank), errors) for rank in range(case.ranks)]  # type: ignore[misc]


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def await_line(path: Path, text: str, ranks: list[int]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not (path.exists() and text in path.read_text()):
        if time.monotonic() > deadline or any(not psutil.pid_exists(pid) for pid in ranks):
            return
        time.sleep(0.001)


def await_end(ranks: list[int]) -> list[int]:
    """Exit statuses (-9 for killed ones); processes that do not end in time are killed, with status -1."""
    statuses, deadline = [], time.monotonic() + _PATIENCE_S
    for pid in ranks:
        if pid in REAPED:
            statuses.append(REAPED[pid])
            continue
        while (found := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.002)
        if found[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            REAPED[pid] = -1
        else:
            REAPED[pid] = os.waitstatus_to_exitcode(found[1])
        statuses.append(REAPED[pid])
    return statuses


REAPED: dict[int, int] = {}


def orphans(writers: list[psutil.Process]) -> int:
    """Writers that outlive their ranks by more than a moment."""
    deadline = time.monotonic() + _PATIENCE_S / 4
    while (alive := [writer for writer in writers if lives(writer)]) and time.monotonic() < deadline:
        time.sleep(0.002)
    kill(alive)
    return len(alive)


def lives(process: psutil.Process) -> bool:
    """Zombies count as gone."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        case = Case(**asked["case"])
        answer = run(case) if asked["generation"] == 1 else {"ended": await_end(start(case, 2)), "orphans": 0}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    os._exit(0)
