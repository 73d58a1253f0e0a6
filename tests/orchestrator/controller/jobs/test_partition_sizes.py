"""How large the place is that a run may use."""

import pytest

from orchestrator.controller.submission_limits import read_sizes

SINFO = "4 gpu*\n8 gpu-long\n1 debug\n"


@pytest.mark.parametrize(
    ("partition", "size"),
    [("", 4), ("debug", 1), ("gpu-long", 8), ("gpu,gpu-long", 8), ("debug,unknown", 1), ("unknown", None)],
)
def test_a_partition_s_size(partition: str, size: int | None) -> None:
    assert read_sizes(SINFO, partition) == size
