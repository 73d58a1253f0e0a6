"""A real job with all that may legally be slow: nobody is blamed, nothing is killed."""

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.end_to_end.user import SLOW_WORKLOAD
from tests.trainer.agent.job import LocalJob, until
from tests.trainer.agent.test_torch_ranks import TINY, UNMEASURED
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptResult
from trainer.protocol.requests import Request, RequestKind

pytestmark = pytest.mark.multi

SLOW = {"hang-in-data": 6.0, "hang-in-forward": 6.0, "hang-in-save": 25.0}
"""Seconds: below the limits of production (8 s in a step, 120 s in a save), a hundred times an ordinary step."""
STEP = 0.06
"""Seconds that ranks sleep in the steps between, which would use the processors meanwhile."""
EVERY = 100
HOG = """
import os, sys
while os.getppid() == int(sys.argv[1]): pass
"""
"""Program that never rests, until the test's process has ended."""


def slow_phases(kinds: list[str]) -> list[dict[str, Any]]:
    """One after the other, each on a seeded rank; saves are every 20 steps."""
    rng = random.Random(20_000)
    return [
        {"kind": kind, "rank": rng.randrange(4), "step": step, "value": SLOW[kind]}
        for step, kind in zip(range(40, 20_000, EVERY), itertools.cycle(kinds), strict=False)
    ]


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """So many programs that never rest."""
    with ExitStack() as stack:
        for _ in range(programs):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", HOG, str(os.getpid())]))
            stack.callback(program.kill)
        yield


def started(warm_job: Callable[..., LocalJob], data: Any, events: list[dict[str, Any]], **over: Any) -> LocalJob:
    """A job that trains until it is stopped."""
    settings = {
        **TINY,
        "train": {**TINY["train"], "steps": 1_000_000},
        "checkpoint": {"every": 20, "keep": 2},
        "drill": {"events": events},
        "data": {"path": str(data)},
        "cluster": {"time": "2:00:00"},
        **over,
    }
    work = warm_job(**{"nodes": 2, "ranks": 2, **settings}).start()
    work.go()
    until(lambda: work.events(EventKind.GENERATION_FIRST_STEP), 120, work.story)
    return work


def stop(work: LocalJob) -> None:
    """As people do."""
    Request(kind=RequestKind.STOP, attempt=1, reason="enough").write(work.run.requests)
    assert work.wait(150) == [76, 76], work.story()


def assert_nothing_happened(work: LocalJob) -> int:
    """Nobody was blamed or killed; returns how many slow phases there were."""
    assert work.events(EventKind.INCIDENT) == [], work.story()
    assert (work.outcome().result, work.outcome().generations) == (AttemptResult.STOPPED, 1), work.story()
    assert all(event.data["signal"] is None for event in work.events(EventKind.RANK_EXITED)), work.story()
    return len(work.events(EventKind.DRILL))


def test_what_may_be_slow_is_left_alone(warm_job: Callable[..., LocalJob], data: Any) -> None:
    slow = {"hang-in-data": (14, 6.0), "hang-in-forward": (17, 6.0), "hang-in-save": (20, 8.0)}
    events = [{"kind": kind, "rank": 1, "step": step, "value": value} for kind, (step, value) in slow.items()]
    args = {"while_there": str(SLOW_WORKLOAD), "seconds": STEP}
    workload = {"target": "slow_llama:SlowLlama", "path": [str(SLOW_WORKLOAD.parent)], "args": args}
    work = started(warm_job, data, events, ranks=1, detection=UNMEASURED, workload=workload)
    until(lambda: any(e.data["step"] >= 20 for e in work.events(EventKind.CHECKPOINT_COMMITTED)), 120, work.story)
    stop(work)
    assert assert_nothing_happened(work) == 3


MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_dim": 64}
EXPERTS = {"experts": {"count": 8, "per_token": 1, "ffn_dim": 48, "balance_rate": 0.0}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp 4": {},
    "4 stages": {"parallel": {"pipeline": {"stages": 4}}, "model": MODEL},
    "ring 4": {"parallel": {"cp": 4, "cp_method": "ring"}, "model": MODEL},
    "ep 4, never balanced": {"parallel": {"ep": 4}, "model": {**MODEL, **EXPERTS}},
}


@pytest.mark.proof
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_minutes_without_a_false_alarm(
    layout: str,
    warm_job: Callable[..., LocalJob],
    data: Any,
    record_property: Callable[[str, object], None],
) -> None:
    alike = layout == "fsdp 4"
    train = {**TINY["train"], "steps": 1_000_000, "batch_size": 16, "dtype": "float32"}
    kinds = list(SLOW) if alike else ["hang-in-data", "hang-in-forward"]
    work = started(warm_job, data, slow_phases(kinds), **({} if alike else {"train": train}), **LAYOUTS[layout])
    over = time.monotonic() + 600.0
    while time.monotonic() < over:
        with busy(4):
            time.sleep(min(20.0, max(0.0, over - time.monotonic())))
        time.sleep(min(10.0, max(0.0, over - time.monotonic())))
    stop(work)
    slow = assert_nothing_happened(work)
    assert slow > (10 if alike else 1)
    if not alike:  # ranks do different work, which makes none of them a straggler
        assert work.events(EventKind.STRAGGLER) == [], work.story()
    where = "" if alike else f" ({layout})"
    record_property(f"real seconds without a false alarm{where}", 600)
    record_property(f"legal slow phases in them{where}", slow)
