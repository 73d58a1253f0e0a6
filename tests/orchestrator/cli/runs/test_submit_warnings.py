"""What `orch submit` says of a layout that fits and still wastes its ranks."""

import pytest

from tests.orchestrator.cli.conftest import Type

PIPELINE = ("parallel.dp_shard=0", "parallel.tp=1", "parallel.pipeline.stages=2")


@pytest.mark.parametrize("verb", [("submit", "--dry-run"), ("config", "validate")])
def test_too_few_micro_batches_are_warned_of_with_what_to_type(orch: Type, verb: tuple[str, ...]) -> None:
    """Two stages on two ranks each: eight sequences of a rank are cut into four by the wish for so many."""
    few = orch(*verb, "tiny-gpt", *PIPELINE, "parallel.pipeline.micro_batches=4")
    assert few.code == 0, few.err
    warned = [line for line in few.err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1
    assert "4 micro-batches for a pipeline of 2 ranks: ranks wait for 20% of each step" in few.err
    assert "warning" not in few.out
    assert "type parallel.pipeline.micro_batches=8" in " ".join(few.err.split())
    assert "micro-batches for" not in orch(*verb, "tiny-gpt", *PIPELINE, "parallel.pipeline.micro_batches=8").err


def test_programs_read_the_warning_in_the_envelope(orch: Type) -> None:
    done = orch("submit", "--dry-run", "--json", "tiny-gpt", *PIPELINE, "parallel.pipeline.micro_batches=4")
    assert [item["code"] for item in done.answer["warnings"]] == ["few_micro_batches"]
