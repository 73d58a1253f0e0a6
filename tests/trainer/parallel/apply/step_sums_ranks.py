"""Forked ranks that sum short and long rows of numbers."""

from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.worker.forked_ranks import Case, report
from trainer.parallel.apply.gradient_buckets import OtherCollective, StepSums


def sums(case: Case) -> Any:
    rank = dist.get_rank()
    row = torch.arange(case["length"], dtype=torch.float64) * 0.1 + rank / 3
    try:
        return [one.hex() for one in StepSums(row, case["steps"][rank]).wait().tolist()]
    except OtherCollective as error:
        return str(error)


def main() -> None:
    report(sums, times=1)
