"""Forked ranks read nothing of an installation that is being replaced."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.trainer.conftest import Ranks, hang, merged, rank_environment

pytestmark = pytest.mark.multi

KINDS = [
    pytest.param(2, {"parallel": {"dp_shard": 2}}, id="sharded"),
    pytest.param(1, {}, id="one rank"),
    pytest.param(2, {"parallel": {"strategy": "ddp"}}, id="replicated", marks=pytest.mark.proof),
    pytest.param(2, {"parallel": {"strategy": "zero1"}}, id="zero1", marks=pytest.mark.proof),
    pytest.param(2, {"parallel": {"strategy": "zero2"}}, id="zero2", marks=pytest.mark.proof),
    pytest.param(2, {"parallel": {"tp": 2}}, id="tensor parallel", marks=pytest.mark.proof),
    pytest.param(2, {"parallel": {"cp": 2}}, id="context parallel", marks=pytest.mark.proof),
    pytest.param(2, {"parallel": {"pp": 2}}, id="pipeline", marks=pytest.mark.proof),
    pytest.param(2, {"parallel": {"fsdp": {"offload": "all"}}}, id="offloaded", marks=pytest.mark.proof),
    pytest.param(1, {"train": {"activation_checkpointing": True}}, id="recomputed", marks=pytest.mark.proof),
    pytest.param(1, {"train": {"precision": "bf16"}}, id="bf16", marks=pytest.mark.proof),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.trainer.worker.fake_agent"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=rank_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield Ranks(process)
    assert process.communicate(timeout=30)[1] == ""  # no output without earlier imports


@pytest.mark.parametrize(("world", "over"), KINDS)
def test_a_restarted_rank_imports_nothing_from_disk(make_run, world, over):
    short = merged({"train": {"steps": 4}, "checkpoint": {"every": 2}}, over)
    run = make_run(world, **short, drill=hang(world - 1, step=4))
    run.train_until_killed(world - 1, committed=2)
    for path in run.attempt.logs.glob("*.imports"):
        path.unlink()
    assert run.train()["codes"] == [0] * world, run.log()
    read = [path.read_text() for path in run.attempt.logs.glob("*.imports")]
    assert read == [""] * world
