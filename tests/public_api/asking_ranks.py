"""One rank whose agent asks it to save, or to save and stop, at a call of its own.

`main` reads one JSON object: rank, world, store, and `asked`, pairs of a call's number and a StopReason.
"""

import json
import os
import sys

import torch.distributed as dist

import orch
from trainer.protocol.rank_progress.progress import ProgressCell, StopReason

CALLS = 80


def main() -> None:
    case = json.loads(sys.argv[1])
    cell = ProgressCell.create()
    os.environ |= {"ORCH_CELLS": f"/proc/self/fd/{cell.descriptor}", "LOCAL_RANK": "0", "RANK": str(case["rank"])}
    dist.init_process_group(
        "gloo", init_method=f"file://{case['store']}", rank=case["rank"], world_size=case["world"]
    )  # fmt: skip
    asked = dict(case["asked"])
    saves, stop = [], None
    for number in range(1, CALLS + 1):
        if number in asked:
            cell.ask_stop(StopReason(asked[number]))
        orch.step(number, loss=0.5)
        if orch.should_save():
            saves.append(number)
            orch.saved("checkpoint")
        if orch.should_stop():
            stop = number
            break
    reading, program = cell.read(), cell.program()
    assert reading is not None
    assert program is not None
    found = {"saves": saves, "stop": stop, "step": reading.step, "saved": reading.saved_step, "flags": program.flags}
    sys.stdout.write(json.dumps({**found, "loss": reading.loss}) + "\n")
    dist.destroy_process_group()
