"""A rank that is alone and leaves torch's own record of its collectives in a file: `pickled OUT` or `twice OUT`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json


def pickled() -> bytes:
    """Two collectives of the world, as torch pickles them."""
    for size in (3, 4):
        dist.all_reduce(torch.ones(size))
    return bytes(_dump_fr_trace())


def twice() -> bytes:
    """Collectives of a group that is made twice, as JSON."""
    for count in (5, 2):
        group = dist.new_group([0], use_local_synchronization=True)
        for _ in range(count):
            dist.all_reduce(torch.ones(2), group=group)
        dist.destroy_process_group(group)
    # gloo's own thread writes that a collective is over: soon after its caller has gone on.
    until = time.monotonic() + 30
    while True:
        record = _dump_fr_trace_json()
        if time.monotonic() > until or all(entry["retired"] for entry in json.loads(record)["entries"]):
            return bytes(record)
        time.sleep(0.01)


def main() -> None:
    what, out = sys.argv[1:]
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # torch reads it with the first collective
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Path(out).write_bytes({"pickled": pickled, "twice": twice}[what]())
