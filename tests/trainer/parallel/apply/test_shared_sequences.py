"""Runs with shared sequences of any length, in any strategy."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.conftest import Run, hang
from trainer.protocol.failures.outcome import ExitCode

pytestmark = pytest.mark.multi

STEPS, BOUND = 20, 2e-5
ULYSSES, RING = {"cp_method": "ulysses"}, {"cp_method": "ring"}


def settings(parallel: dict[str, Any], *, world: int = 2, **over: Any) -> dict[str, Any]:
    train = {"steps": STEPS, "dtype": "float32", **over.pop("train", {})}
    return {"world": world, "parallel": parallel, "optimizer": {"lr": 1e-3}, "train": train, **over}


def far_from_one(undisturbed: Callable[..., Run], **given: Any) -> float:
    whole = {**given, "world": 1, "parallel": {}}
    one, other = (undisturbed(**each).metrics() for each in (whole, given))
    assert sorted(other) == list(range(1, given["train"]["steps"] + 1))
    return max(
        abs(other[step]["loss"] - one[step]["loss"]) / one[step]["loss"]
        + 0.1 * abs(other[step]["grad_norm"] - one[step]["grad_norm"]) / one[step]["grad_norm"]
        for step in one
    )


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ulysses 2": (2, {"cp": 2, **ULYSSES}),
    "ring 2": (2, {"cp": 2, **RING}),
    "ring 3": (3, {"cp": 3, **RING}),
    "ulysses 4, fewer keys than ranks": (4, {"cp": 4, **ULYSSES}),
    "ring 4": (4, {"cp": 4, **RING}),
    "ring 2 in ddp 2": (4, {"cp": 2, "strategy": "ddp", **RING}),
    "ulysses 2 in zero1 2": (4, {"cp": 2, "strategy": "zero1", **ULYSSES}),
    "ring 2 in hsdp 2": (4, {"cp": 2, "strategy": "hsdp", "dp_replicate": 2, **RING}),
}


@pytest.mark.parametrize("length", [32, 29, 3])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.proof
def test_losses_and_gradient_norms_are_those_of_one_rank(
    undisturbed: Callable[..., Run], name: str, length: int, record_property: Callable[[str, object], None]
) -> None:
    world, parallel = LAYOUTS[name]
    batch = 12 if world == 3 else 8
    found = far_from_one(undisturbed, **settings(parallel, world=world, train={"seq_len": length, "batch_size": batch}))
    record_property(f"largest relative difference from one rank, {name}, {length} tokens", found)
    assert found <= BOUND


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.proof
def test_tokens_have_the_positions_of_their_real_places(undisturbed: Callable[..., Run], method: str) -> None:
    target = {"target": "tests.trainer.parallel.apply.sharp_llama:SharpLlama"}
    given = settings({"cp": 2, "cp_method": method}, train={"steps": 4, "seq_len": 29}, workload=target)
    assert far_from_one(undisturbed, **given) <= BOUND


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize(
    "train",
    [
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "recompute": {"keep": "products"}},
        {"loss_chunks": 4},
        {"micro_batch_size": 2},
    ],
    ids=["recomputed", "products kept", "loss in chunks", "micro-batches"],
)
@pytest.mark.proof
def test_what_else_a_step_can_have_changes_no_loss(
    undisturbed: Callable[..., Run], method: str, train: dict[str, Any]
) -> None:
    parallel = {"cp": 2, "cp_method": method}
    assert far_from_one(undisturbed, **settings(parallel, train={**train, "steps": 6})) <= BOUND


@pytest.mark.proof
@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("over", [{"model": {"tie_embeddings": True}}, {"parallel": {"fsdp": {"offload": "all"}}}])
def test_tied_embeddings_and_host_memory(undisturbed: Callable[..., Run], method: str, over: dict[str, Any]) -> None:
    parallel = {"cp": 2, "cp_method": method, **over.get("parallel", {})}
    given = settings(parallel, train={"steps": 6}, **{"model": over.get("model", {})})
    assert far_from_one(undisturbed, **given) <= BOUND


@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_half_precision_stays_near_float32(
    undisturbed: Callable[..., Run], strategy: str, method: str, dtype: str
) -> None:
    parallel = {"cp": 2, "cp_method": method, "strategy": strategy}
    full, half = (
        undisturbed(**settings(parallel, train={"steps": 8, "dtype": each})).losses() for each in ("float32", dtype)
    )
    assert half == pytest.approx(full, rel=2e-2)
    assert half != full


def test_a_killed_rank_changes_no_bit_and_every_rank_draws_its_own_numbers(make_run: Callable[..., Run]) -> None:
    target = {"target": "tests.trainer.parallel.apply.dropping_llama:DroppingLlama"}
    run = make_run(**settings({"cp": 2, **RING}, train={"steps": 7, "seq_len": 29}, workload=target), drill=hang(1, 7))
    assert run.train_until_killed(1, committed=3, recorded=5)["codes"][1] == -9
    assert run.train()["codes"] == [ExitCode.FINISHED] * 2, run.log()
    first, again = (run.metrics(generation) for generation in (1, 2))
    assert sorted(again) == [4, 5, 6, 7]
    for step in (4, 5):
        for name in ("loss", "grad_norm", "metrics"):
            assert again[step][name] == first[step][name]
    drawn = [line["metrics"] for line in run.metrics().values()]
    assert all(one["drawn"] != one["drawn first"] for one in drawn)


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.proof
def test_bytes_that_ranks_of_a_sequence_send_are_told_apart(undisturbed: Callable[..., Run], method: str) -> None:
    run = undisturbed(**settings({"cp": 2, "cp_method": method}, model={"kv_heads": 4}, train={"steps": 3}))
    (told,) = [line["bytes"] for line in run.metrics().values() if "bytes" in line]
    tensor = 8 * 8 * 32 * 4  # of one of query, key, value and result: sequences x half of the tokens x width x bytes
    # Exchanged: all four there and back. Around a ring of two: keys and values once each way, their gradients twice.
    sent = {"ulysses": 2 * 4, "ring": 2 + 2 + 2 * 2}[method]
    assert told["cp"] == sent * tensor  # in one layer
    assert told["dp_shard"] > 0
