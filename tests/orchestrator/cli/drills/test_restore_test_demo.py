"""`orch demo restore-test`: the flipped bit and the wrong verdicts."""

from pathlib import Path
from typing import Any

import pytest

from checkpointing.format.manifest import INDEX, Index, Piece, TensorInfo
from orchestrator.cli.drills.demo import FlippedBit, describe_wrong_verdicts, flip_bit, verdict_line
from orchestrator.registry.records import RestoreTest

BIT = FlippedBit(step=30, file="__0_0.distcp", byte=96, tensor="model/large")


def ended(step: int, verdict: str, reason: str = "", **evidence: Any) -> RestoreTest:
    return RestoreTest(
        test=f"demo-1-test-{step}", run="demo-1", checkpoint=f"step-{step:08d}.001-26b924be", layout="1", step=step,
        begun_at=1.0, ended_at=9.0, verdict=verdict, reason=reason, evidence=evidence,
    )  # fmt: skip


def test_one_bit_is_flipped_inside_the_largest_tensor_of_the_model(tmp_path: Path) -> None:
    tensors = {"model/large": TensorInfo("float32", (16,)), "optimizer/larger": TensorInfo("float32", (32,))}
    pieces = (
        Piece("model/large", "__0_0.distcp", (0,), (16,), 0, 128, 64, 64),
        Piece("optimizer/larger", "__1_0.distcp", (0,), (32,), 0, 192, 64, 128),
    )
    (tmp_path / INDEX).write_bytes(Index(tensors, pieces).encode())
    before = bytes(range(128))
    (tmp_path / "__0_0.distcp").write_bytes(before)
    assert flip_bit(tmp_path, 30) == BIT
    after = (tmp_path / "__0_0.distcp").read_bytes()
    assert [(at, one ^ other) for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other] == [
        (96, 1)
    ]


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([ended(10, "RESTORED", compared=3), ended(30, "CORRUPT", "__0_0.distcp chunk 0: digest differs")], ""),
        ([ended(30, "RESTORED", compared=3)], "step 30 on 1 is RESTORED, not CORRUPT"),
        ([ended(30, "CORRUPT", "__1_0.distcp chunk 0: digest differs")], "the damage is in __0_0.distcp"),
        ([ended(20, "SUSPECT", "loss of step 21 is 3.0")], "SUSPECT, not RESTORED: loss of step 21 is 3.0"),
        ([ended(20, "NOT_FINISHED", "cancelled")], "step 20 on 1 is NOT_FINISHED"),
        ([ended(20, "RESTORED", compared=0)], "step 20 on 1: no step was compared"),
    ],
)
def test_wrong_verdicts_are_described(tests: list[RestoreTest], words: str) -> None:
    found = describe_wrong_verdicts(tests, BIT)
    assert words in "".join(found)
    assert bool(found) == bool(words)


def test_a_verdict_line_has_the_recovery_time() -> None:
    line = verdict_line(ended(10, "RESTORED", "3 steps agree", rto_seconds=2.34))
    assert line == "RESTORED   step 10 on 1 rank, first step after 2.3 s: 3 steps agree"
    assert verdict_line(ended(30, "CORRUPT", "digest differs")) == "CORRUPT    step 30 on 1 rank: digest differs"
