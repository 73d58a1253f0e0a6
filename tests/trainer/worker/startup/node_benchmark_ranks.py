"""Forked ranks that join a world and run the node benchmark."""

import json
import os
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from trainer.protocol.config import JobConfig
from trainer.protocol.messages.ranks import FROM_RANK, RankSpec
from trainer.worker.startup import node_benchmark


def spec_of(rank: int, wanted: dict) -> RankSpec:
    local = wanted["local"]
    return RankSpec(
        run_dir=wanted["folder"], attempt=1, generation=1, fit=wanted.get("fit", True), rank=rank,
        local_rank=rank % local, world_size=wanted["world"], local_world_size=local, node=rank // local,
        node_name=f"n{rank // local}",
        cell_fd=-1, control_fd=-1, host="127.0.0.1",
    )  # fmt: skip


def _hold_up() -> None:
    exchange, late = node_benchmark._exchange, [0.0]

    def held_up(*args: Any) -> float:
        late[0] += 900.0
        return exchange(*args)

    node_benchmark._exchange = held_up
    node_benchmark.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=lambda: time.monotonic() + late[0], thread_time=time.thread_time, perf_counter=time.perf_counter
    )


def one(rank: int, wanted: dict, control: socket.socket) -> dict:
    config = JobConfig()
    if not wanted.get("on", True):
        preflight = replace(config.detection.preflight, on=False)
        config = replace(config, detection=replace(config.detection, preflight=preflight))
    if "seconds" in wanted:
        preflight = replace(config.detection.preflight, seconds=wanted["seconds"])
        config = replace(config, detection=replace(config.detection, preflight=preflight))
        if rank == 1:
            _hold_up()
    store = dist.FileStore(str(Path(wanted["folder"]) / "store"), wanted["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=wanted["world"])
    before = moved()
    node_benchmark.measure(spec_of(rank, wanted), config, control, torch.device("cpu"))
    after = moved()
    dist.barrier()
    return {name: [before[name], after[name]] for name in before}


def moved() -> dict:
    group = dist.group.WORLD
    return {
        "random": torch.get_rng_state().sum().item(),
        "collectives": group._get_sequence_number_for_group(),
    }


def main() -> None:
    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    pids, controls = [], []
    for rank in range(wanted["world"]):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            seen = one(rank, wanted, theirs)
            theirs.send(json.dumps(seen).encode())
            os._exit(0)
        theirs.close()
        pids.append(pid)
        controls.append(ours)
    answers = []
    for control in controls:
        first = json.loads(control.recv(65536))
        said = asdict(FROM_RANK.decode(first)) if "say" in first else None
        seen = json.loads(control.recv(65536)) if said else first
        answers.append({"said": said, **seen})
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.stdout.write(json.dumps(answers))
    sys.exit(any(codes))
