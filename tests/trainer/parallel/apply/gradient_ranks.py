"""Forked ranks that share experts: gradients compared with those of one rank."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.trainer.worker.forked_ranks import report
from trainer.models import parallelize
from trainer.models.built_in import LlamaWorkload
from trainer.models.llama import Llama
from trainer.models.pipelined_llama import pipelined_llama
from trainer.parallel.apply import mesh
from trainer.parallel.apply.data_parallel import GradientSync
from trainer.parallel.apply.expert_parallel import build_expert_balance
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build
from trainer.worker.data import NOT_TRAINED, MaskedTokens

BATCH, LENGTH, EXPERTS = 8, 13, 8
FEATURES = {
    "attention": {"qkv_bias": True, "qk_norm": True, "head_dim": 12, "window": 5},
    "rope_scaling": {"kind": "llama3", "factor": 4.0, "original_length": 8},
}  # fmt: skip
"""Differences of other decoders from Llama 2."""


class Found(NamedTuple):
    gradients: dict[str, torch.Tensor]
    """Whole gradients of this rank's parameters."""
    load: torch.Tensor
    """Tokens per expert over all ranks."""
    moves: dict[str, list[int]]
    """Adjustments in this rank's layers after the step."""


def config(
    parallel: dict[str, Any], world: int, train: dict[str, Any], layers: int = 2, *, tied: bool, features: bool
) -> JobConfig:
    made = build(
        JobConfig,
        {
            "cluster": {"ranks_per_node": world},
            "parallel": parallel,
            "model": {
                "vocab_size": 60, "dim": 32, "layers": layers, "heads": 4, "kv_heads": 4, "tie_embeddings": tied,
                "experts": {"count": EXPERTS, "per_token": 2, "ffn_dim": 24}, **(FEATURES if features else {}),
            },
            "train": {"batch_size": BATCH, "seq_len": LENGTH, "dtype": "float32", **train},
        },
    )  # fmt: skip
    assert isinstance(made, JobConfig)
    return made


def trained(case: dict[str, Any]) -> Found:
    world = dist.get_world_size()
    kind = {"tied": case.get("tied", False), "features": case.get("features", False)}
    made = config(case["parallel"], world, case.get("train", {}), case.get("layers", 2), **kind)
    layout = mesh.build(made.parallel, torch.device("cpu"), dist.get_rank(), world)
    own = batch(made.train.seq_len).chunk(layout.dp_size)[layout.dp_rank]
    model = (
        _in_stages(made, layout, own)
        if layout.sizes["pp"] > 1
        else _whole(made, layout, own.chunk(case.get("micro", 1)), masked=case.get("masked", False))
    )
    return _ended(model)


def mean_loss(model: nn.Module, part: torch.Tensor, parts: int, *, masked: bool) -> torch.Tensor:
    """Return the loss of one of `parts` micro-batches; `masked`: tokens that 3 divides are not trained."""
    if not masked:
        return LlamaWorkload.loss(None, model, part)  # type: ignore[arg-type]
    whole, targets = batch(part.shape[1] - 1)[:, 1:], part[:, 1:]
    tokens = MaskedTokens(
        part[:, :-1], targets.masked_fill(targets % 3 == 0, NOT_TRAINED), (whole % 3 != 0).sum() / parts
    )
    return LlamaWorkload.loss(None, model, tokens)  # type: ignore[arg-type]


def _whole(made: JobConfig, layout: mesh.Layout, parts: Sequence[torch.Tensor], *, masked: bool) -> nn.Module:
    with torch.device("meta"):
        model = Llama(made.model, made.train)
    parallelize.shard(model, layout, made)
    model.materialize(layout.device, seed=1)
    skew(model)
    sync = GradientSync(model, layout, made.parallel.reduce, lambda: None)
    for number, part in enumerate(parts):
        loss = mean_loss(model, part, len(parts) * layout.dp_size, masked=masked)
        sync.backward(loss / len(parts), is_last=number == len(parts) - 1)
    return model


def _in_stages(made: JobConfig, layout: mesh.Layout, own: torch.Tensor) -> nn.Module:
    model = pipelined_llama(made, layout)
    model.set_initial_weights(1)
    skew(model)
    sync = GradientSync(model, layout, made.parallel.reduce)
    parts = own.chunk(model.pipeline.micro_batches)
    model.pipeline.evaluate(parts)
    model.pipeline.step(parts)
    sync.reduce_now()
    return model


def _ended(model: nn.Module) -> Found:
    balance = build_expert_balance(model)
    load = balance.loads()
    assert load is not None
    if dist.is_initialized() and not isinstance(model, Alone):
        dist.all_reduce(load)
    balance.step_ended(load, moves=True)
    assert balance.layers == len(load) // EXPERTS
    moves = {name: buffer.tolist() for name, buffer in model.named_buffers() if name.endswith("moves")}
    return Found(gradients(model), load, moves)


def batch(length: int) -> torch.Tensor:
    return torch.randint(60, (BATCH, length + 1), generator=torch.Generator().manual_seed(3))


def skew(model: nn.Module) -> None:
    for name, moves in model.named_buffers():
        if name == "layers.0.feed_forward.router.moves":
            moves += torch.tensor([400, 0, 0, 0, 0, 0, 0, -4000])


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return found


class Alone(Llama):
    """A model that one rank has all of, with the whole batch."""


@functools.cache
def of_one_rank(layers: int, length: int, *, tied: bool, features: bool, masked: bool) -> Found:
    made = config({}, 1, {"seq_len": length}, layers, tied=tied, features=features)
    model = Alone(made.model, made.train)
    model.materialize(torch.device("cpu"), seed=1)
    skew(model)
    mean_loss(model, batch(length), 1, masked=masked).backward()
    return _ended(model)


def differences(case: dict[str, Any]) -> dict[str, Any]:
    length = case.get("train", {}).get("seq_len", LENGTH)
    kind = {"tied": case.get("tied", False), "features": case.get("features", False)}
    due = of_one_rank(case.get("layers", 2), length, **kind, masked=case.get("masked", False))
    found = trained(case)
    assert set(found.gradients) <= set(due.gradients)
    rest = torch.cat([found.gradients[name].flatten() for name in sorted(found.gradients)]).contiguous()
    wanted = {name: due.gradients[name] for name in found.gradients}
    return {
        "differences": {
            name: float((found.gradients[name] - want).abs().max() / want.abs().max()) for name, want in wanted.items()
        },
        "names": len(due.gradients),
        "bits": hashlib.sha256(bytes(rest.view(torch.uint8).tolist())).hexdigest(),
        "load": found.load.tolist(),
        "load of one rank": due.load.tolist(),
        "moves": found.moves,
        "moves of one rank": {name: due.moves[name] for name in found.moves},
    }


def main() -> None:
    report(differences)
