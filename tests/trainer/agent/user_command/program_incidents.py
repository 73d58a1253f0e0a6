"""Faults in an ordinary DDP script that knows nothing of orch, and what is said of them."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trainer.agent.job import LocalJob, until
from trainer.protocol.events import EventKind

WORLD = 4
PATIENCE = 240.0

DDP = """
import ctypes, os, queue, sys, threading, time
import torch, torch.distributed as dist

kind, culprit, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = queue.Queue(2)

def produce():
    for number in range(10 ** 9):
        if number == at and mine and kind == "thread":
            raise ValueError("a crash in the thread that reads data")
        batches.put(torch.full((2, 8), float(number % 5)))

def spin():
    count = 0
    while True:
        count += 1

def hold():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def wait():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def strike():
    if kind == "loop":
        spin()
    elif kind == "gil":
        hold()
    elif kind == "deadlock":
        wait()
    elif kind == "sleep":
        time.sleep(10 ** 6)
    elif kind == "barrier":
        dist.barrier()
    elif kind == "kill":
        os.kill(os.getpid(), 9)
    elif kind == "raise":
        raise ValueError("a crash in the main thread")
    elif kind == "stop":
        os.kill(os.getpid(), 19)

def work(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

mine = rank == culprit and not again
began = time.monotonic()
threading.Thread(target=produce, daemon=True).start()
for step in range(1, 10 ** 6):
    batch = batches.get()
    if mine and step == at:
        strike()
    if mine and kind == "slow" and time.monotonic() > began + 40.0:  # its own past is known by then
        work(0.1)
    optimizer.zero_grad()
    loss = model(batch).square().sum()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
"""

KINDS = {
    "stop": "stopped",
    "loop": "stuck_in_compute",
    "gil": "lock_held",
    "deadlock": "stuck_in_compute",
    "sleep": "stuck_in_compute",
    "thread": "stuck_in_compute",
    "barrier": "desync",
    "kill": "rank_killed",
    "raise": "user_error",
    "slow": "slow",
}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What was brought about, and what was said of it."""

    kind: str
    culprit: int
    named: int | None
    taken_for: str
    reason: str

    @property
    def is_right(self) -> bool:
        return self.named == self.culprit

    @property
    def is_wrong(self) -> bool:
        """Whether another rank was named. Naming nobody is not wrong."""
        return self.named is not None and self.named != self.culprit


def play(kind: str, seed: int, make: Callable[..., LocalJob], folder: Path) -> Told:
    """Bring one fault about in a job of its own."""
    rng = random.Random(f"{kind} {seed}")
    culprit, step = rng.randrange(WORLD), rng.randrange(8, 20)
    place = folder / f"{kind}-{seed}"
    place.mkdir()
    (place / "train.py").write_text(DDP)
    work = make(
        folder=f"run-{kind}-{seed}", command=["python", "train.py", kind, str(culprit), str(step)],
        env={"ORCH_SUBMIT_DIR": str(place), "OMP_NUM_THREADS": "1"},
        detection={"preflight": {"on": False}, "hang": {"slow": 4.0, "evidence": 5.0}},
    ).start()  # fmt: skip
    work.go()
    found = until(lambda: first_word(work), PATIENCE, work.story)
    work.close()
    return Told(kind=kind, culprit=culprit, **found)


def first_word(work: LocalJob) -> dict[str, Any] | None:
    """What the first incident or the first generation's end says."""
    for event in work.events(EventKind.INCIDENT):
        return {"named": event.data["rank"], "taken_for": event.data["kind"], "reason": event.data["reason"]}
    for event in work.events(EventKind.STRAGGLER):
        return {"named": event.data["rank"], "taken_for": "slow", "reason": event.data["reason"]}
    for event in work.events(EventKind.GENERATION_ENDED):
        failure = event.data["failure"] or {"rank": None, "kind": "none"}
        return {"named": failure["rank"], "taken_for": failure["kind"], "reason": event.data["reason"]}
    return None


def matrix(told: list[Told]) -> dict[str, int]:
    return dict(Counter(f"{one.kind}: {'right' if one.is_right else one.taken_for}" for one in told))
