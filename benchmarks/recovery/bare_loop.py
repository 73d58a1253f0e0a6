"""The bare loop: one rank of the product's model, data and reductions, in a plain process without monitoring.

    RANK=... WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=...
        python -m benchmarks.recovery.bare_loop RUN_FOLDER FOLDER STEPS

It has no agent, cell, stopwatch, ticker, metrics, saver or agreement. Each step writes a line to FOLDER/rank-N.jsonl,
{time, step, pid}, like a rank of the product.
"""

import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.recovery.script import tell
from trainer.parallel.apply import mesh
from trainer.protocol.config import JobConfig, load
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.run_dir import RunDir
from trainer.worker import workload
from trainer.worker.optimizer import learning_rate, set_learning_rate
from trainer.worker.startup import rendezvous as devices
from trainer.worker.train_loop import reduction


def main(config: JobConfig, folder: Path, steps: int) -> None:
    devices.be_deterministic(devices.threads_per_rank(config.cluster))
    torch.manual_seed(config.train.seed)
    random.seed(config.train.seed)
    dist.init_process_group("gloo")
    made = workload.build(config)
    layout = mesh.build(config.parallel, torch.device("cpu"), dist.get_rank(), dist.get_world_size())
    model = made.parallelize(made.build_model(), layout)
    optimizer, data = made.build_optimizer(model), made.build_data(layout)
    with (folder / f"rank-{dist.get_rank()}.jsonl").open("a") as lines:
        for step in range(1, steps + 1):
            batches = data.take()
            total = torch.zeros(())
            for batch in batches:
                loss = made.loss(model, batch) / len(batches)
                loss.backward()
                total += loss.detach()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            reduced = reduction.reduce(step, gradients, total, StopReason.NONE, reduction.RankZeroMessage())
            reduction.clip(gradients, reduced.norm, config.optimizer.clip_norm)
            set_learning_rate(optimizer, learning_rate(config.optimizer, config.train.steps, step))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tell(lines, step)
    os._exit(0)  # the others may have exited already


if __name__ == "__main__":
    main(load(RunDir(Path(sys.argv[1])), attempt=0), Path(sys.argv[2]), int(sys.argv[3]))
