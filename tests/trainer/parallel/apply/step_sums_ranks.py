"""Forked ranks that add up rows of numbers: sums of a short row and of a long one, and of rows of several steps."""

from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.worker.forked_ranks import Case, report
from trainer.parallel.apply.gradient_buckets import OtherCollective, StepSums


def sums(case: Case) -> Any:
    """The digits of the sums, or what was raised; `steps`: that of each rank."""
    rank = dist.get_rank()
    row = torch.arange(case["length"], dtype=torch.float64) * 0.1 + rank / 3
    try:
        return [one.hex() for one in StepSums(row, case["steps"][rank]).wait().tolist()]
    except OtherCollective as error:
        return str(error)


def main() -> None:
    report(sums, times=1)
