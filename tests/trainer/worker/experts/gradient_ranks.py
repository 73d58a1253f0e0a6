"""Forked ranks that share the experts of a small model: its gradients beside those of one rank with the whole batch."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.trainer.worker.forked_ranks import report
from trainer.contract.config import JobConfig, build
from trainer.worker import parallelize
from trainer.worker.experts.balance import ExpertBalance
from trainer.worker.llama import Llama
from trainer.worker.parallel import mesh
from trainer.worker.parallel.data_parallel import GradientSync

BATCH, LENGTH, EXPERTS = 8, 13, 8


def config(parallel: dict[str, Any], world: int, train: dict[str, Any]) -> JobConfig:
    made = build(
        JobConfig,
        {
            "cluster": {"ranks_per_node": world},
            "parallel": parallel,
            "model": {
                "vocab_size": 60, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 4,
                "experts": {"count": EXPERTS, "per_token": 2, "ffn_dim": 24},
            },
            "train": {"batch_size": BATCH, "seq_len": LENGTH, "dtype": "float32", **train},
        },
    )  # fmt: skip
    assert isinstance(made, JobConfig)
    return made


def trained(case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The gradients of this batch, whole, and the load of every expert, both of all ranks."""
    world, train = dist.get_world_size(), case.get("train", {})
    made = config(case["parallel"], world, train)
    layout = mesh.build(made.parallel, torch.device("cpu"), dist.get_rank(), world)
    with torch.device("meta"):
        model = Llama(made.model, made.train)
    parallelize.shard(model, layout, made)
    model.materialize(layout.device, seed=1)
    skew(model)
    own = batch().chunk(layout.dp_size)[layout.dp_rank]
    parts = own.chunk(case.get("micro", 1))
    sync = GradientSync(model, layout, made.parallel.reduce, lambda: None)
    for number, part in enumerate(parts):
        sync.backward(model(part[:, :-1], part[:, 1:]) / len(parts), is_last=number == len(parts) - 1)
    load = ExpertBalance(model).loads()
    assert load is not None
    dist.all_reduce(load)
    return gradients(model), load


def batch() -> torch.Tensor:
    return torch.randint(60, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def skew(model: Llama) -> None:
    """Make some experts of the first layer popular, and one never chosen."""
    moves = model.layers[0].feed_forward.router.moves
    moves += torch.tensor([400, 0, 0, 0, 0, 0, 0, -4000])


def gradients(model: Llama) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return found


def of_one_rank() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    made = config({}, 1, {})
    model = Llama(made.model, made.train)
    model.materialize(torch.device("cpu"), seed=1)
    skew(model)
    model(batch()[:, :-1], batch()[:, 1:]).backward()
    load = ExpertBalance(model).loads()
    assert load is not None
    return gradients(model), load


def differences(case: dict[str, Any]) -> dict[str, Any]:
    """How far gradients are from those of one rank, relative to the largest of each tensor; their bits; the loads."""
    due, due_load = of_one_rank()
    found, load = trained(case)
    assert list(found) == list(due)
    rest = torch.cat([found[name].flatten() for name in sorted(found)]).contiguous()
    return {
        "differences": {name: float((found[name] - want).abs().max() / want.abs().max()) for name, want in due.items()},
        "bits": hashlib.sha256(bytes(rest.view(torch.uint8).tolist())).hexdigest(),
        "load": load.tolist(),
        "load of one rank": due_load.tolist(),
    }


if __name__ == "__main__":
    report(differences)
