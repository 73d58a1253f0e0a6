"""Minimal agent: forks warm ranks, relays the store's address, requests stops and kills ranks; one scenario per line.

Started once per test session, because importing torch takes seconds. Reads scenarios as JSON lines on stdin:
{run_dir, attempt, generation, world, patience, actions: [{at_step, of_rank, committed, do, rank, reason}]}
(`still_after`: ends all when they stand still for two seconds and are at that step at least),
with `do` one of ask, kill, revoke, done when `of_rank` is at that step, the checkpoint of step `committed` exists and
the line of step `recorded` is written, and answers each with
{codes: [exit code or minus signal], steps: [...], last: [last word or null], seconds}.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.trainer.worker.forked_writers import ForkedWriters
from tests.warm_root import skip_absent_numpy
from trainer.protocol.config import JobConfig
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.launch_token import revoke
from trainer.protocol.messages.ranks import FROM_RANK, RankSpec, RendezvousStore, receive_message, send_message
from trainer.protocol.rank_progress.progress import ProgressCell, StopReason
from trainer.protocol.run_dir import RunDir
from trainer.worker.main import rank_main
from trainer.worker.startup import node_benchmark
from trainer.worker.startup.preimport import import_lazy_parts, import_workload


def imported_files(names: set[str]) -> list[str]:
    specs = [getattr(sys.modules[name], "__spec__", None) for name in names]
    return sorted(spec.origin for spec in specs if spec is not None and spec.has_location and spec.origin)


class Rank:
    def __init__(self, scenario: dict, rank: int, writers: ForkedWriters) -> None:
        self.rank = rank
        self.cell = ProgressCell.create()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        world = scenario["world"]
        memory, writer = writers.connection()
        spec = RankSpec(
            run_dir=scenario["run_dir"], attempt=scenario["attempt"], generation=scenario["generation"], rank=rank,
            local_rank=rank, world_size=world, local_world_size=world, node=0, node_name="n0",
            cell_fd=self.cell.descriptor, control_fd=theirs.fileno(), host="127.0.0.1",
            arena_fd=memory, writer_fd=writer,
        )  # fmt: skip
        log = RunDir(Path(scenario["run_dir"])).attempt(scenario["attempt"]).rank_log(rank)
        self.pid = os.fork()
        if self.pid == 0:
            self.control.close()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            theirs.detach()
            known = set(sys.modules)
            code = rank_main(spec)
            log.with_suffix(".imports").write_text("\n".join(imported_files(set(sys.modules) - known)))
            os._exit(code)
        theirs.close()
        os.close(memory)
        os.close(writer)
        self.code: int | None = None
        self.last: RankEnd | None = None

    def poll(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def step(self) -> int:
        reading = self.cell.read()
        return reading.step if reading else -1

    def heard(self) -> RankEnd | None:
        while (message := receive_message(self.control, FROM_RANK)) is not None:
            if isinstance(message, RankEnd):
                self.last = message
        return self.last

    def close(self) -> None:
        self.cell.close()
        self.control.close()


def due(ranks: list[Rank], scenario: dict, action: dict) -> bool:
    if ranks[action["of_rank"]].step() < action["at_step"]:
        return False
    run = RunDir(Path(scenario["run_dir"]))
    steps = run.attempt(scenario["attempt"]).metrics
    if "recorded" in action and not (steps.exists() and f'"step":{action["recorded"]},' in steps.read_text()):
        return False
    return "committed" not in action or any(run.checkpoints.glob(f"step-{action['committed']:08d}*/COMMIT"))


def act(ranks: list[Rank], scenario: dict, actions: list[dict]) -> None:
    for action in [action for action in actions if due(ranks, scenario, action)]:
        actions.remove(action)
        hit = ranks[action["rank"]]
        if action["do"] == "kill":
            os.kill(hit.pid, signal.SIGKILL)
        elif action["do"] == "revoke":
            revoke(RunDir(Path(scenario["run_dir"])).attempt(scenario["attempt"]).go)
        else:
            hit.cell.ask_stop(StopReason[action["reason"]])


class Stillness:
    def __init__(self) -> None:
        self.seen: list = []
        self.since = time.monotonic()

    def lasts(self, ranks: list[Rank], scenario: dict) -> bool:
        seen = [rank.cell.read() for rank in ranks]
        if seen != self.seen:
            self.seen, self.since = seen, time.monotonic()
        step = min(rank.step() for rank in ranks)
        return step >= scenario.get("still_after", step + 1) and time.monotonic() - self.since > 2.0


PEERS_END_SECONDS = 20.0
"""From the first failure of a rank to the end of its peers. gloo does not always notice that a peer died during an
all-reduce, so the agent ends the peers of a failed rank, and so does its stand-in."""


def end_living(ranks: list[Rank]) -> None:
    for rank in ranks:
        if rank.code is None:
            os.kill(rank.pid, signal.SIGKILL)


def run(scenario: dict, writers: ForkedWriters) -> dict:
    begin = time.monotonic()
    ranks = [Rank(scenario, rank, writers) for rank in range(scenario["world"])]
    first = receive_message(ranks[0].control, FROM_RANK)
    store = first if isinstance(first, RendezvousStore) else None
    ranks[0].last = first if isinstance(first, RankEnd) else None
    for rank in ranks[1:] if store else []:
        with contextlib.suppress(OSError):  # it may be dead already
            send_message(rank.control, store)
    actions = list(scenario["actions"])
    timed_out = False
    failed_at: float | None = None
    stillness = Stillness()
    while not all([rank.poll() for rank in ranks]):
        act(ranks, scenario, actions)
        now = time.monotonic()
        if failed_at is None and any(rank.code for rank in ranks):
            failed_at = now
        if failed_at is not None and now - failed_at > PEERS_END_SECONDS:
            end_living(ranks)
        elif not timed_out and (now - begin > scenario["patience"] or stillness.lasts(ranks, scenario)):
            timed_out = True
            end_living(ranks)
        time.sleep(0.003 if actions else 0.01)
    answer = {
        "codes": [rank.code for rank in ranks],
        "steps": [rank.step() for rank in ranks],
        "cells": [[rank.cell.read().phase.name, rank.cell.read().collective] for rank in ranks],
        "work": [[rank.cell.work().steps, *rank.cell.work().sections] for rank in ranks],
        "saved": [rank.cell.read().saved_step for rank in ranks],
        "restored": [rank.cell.read().restored_step for rank in ranks],
        "last": [None if (last := rank.heard()) is None else asdict(last) for rank in ranks],
        "seconds": time.monotonic() - begin,
        "timed_out": timed_out,
    }
    for rank in ranks:
        rank.close()
    return answer


def shrink_benchmark() -> None:
    """Make the node benchmark nearly free; it has tests of its own."""
    for sizes, least in (
        (node_benchmark._MATRIX_SIDE, 8), (node_benchmark._COPY_BYTES, 4096), (node_benchmark._EXCHANGE_BYTES, 4096)
    ):  # fmt: skip
        sizes["cpu"] = least


def main() -> None:
    shrink_benchmark()
    writers = ForkedWriters()
    import_lazy_parts()
    import_workload(JobConfig())
    skip_absent_numpy()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line), writers)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
