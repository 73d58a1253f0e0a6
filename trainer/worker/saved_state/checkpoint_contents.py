"""What is in a checkpoint: named tensors to be filled in place, and a few plain facts."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

OWN_BUFFERS = {"own_buffers": "all"}
"""In a checkpoint's facts: buffers of every dtype are kept per rank. Older releases kept those that float so."""


def buffer_slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every place of a persistent buffer, filled or None: its full name, its module, and its name there."""
    for prefix, module in model.named_modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), module, name


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name; a shared buffer is listed under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, module, key in buffer_slots(model):
        buffer = module._buffers[key]
        if buffer is not None and id(buffer) not in seen:
            seen.add(id(buffer))
            found[name] = buffer
    return found


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers under `model/<name>`; a shared parameter has its first name."""
    found = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    found.update({f"model/{name}": buffer for name, buffer in persistent_buffers(model).items()})
    return found


def shared_tensors(model: nn.Module, saved: Mapping[str, Any] = OWN_BUFFERS) -> dict[str, torch.Tensor]:
    """Return the `model_tensors` that all ranks share, in a checkpoint with the facts `saved`."""
    own = {f"model/{name}" for name in of_each_rank(_own_buffers(model), saved)}
    return {key: tensor for key, tensor in model_tensors(model).items() if key not in own}


def buffers_name(rank: int) -> str:
    return f"buffers/rank-{rank:05d}/"


def rank_buffers(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Return the buffers that may differ between ranks, such as statistics and counters, under keys of this rank."""
    return {f"{buffers_name(rank)}{name}": buffer for name, buffer in _own_buffers(model).items()}


def _own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    alike = alike_on_all_ranks(model)
    buffers = persistent_buffers(model)
    return {name: b for name, b in buffers.items() if name not in alike and not isinstance(b, DTensor)}


def alike_on_all_ranks(model: nn.Module) -> set[str]:
    """Return the names of the buffers that their modules keep equal on all ranks."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "same_on_all_ranks", ())
    }


def of_each_rank(buffers: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint with the facts `saved` keeps per rank."""
    every = saved.get("own_buffers") == OWN_BUFFERS["own_buffers"]
    return {name: buffer for name, buffer in buffers.items() if every or buffer.is_floating_point()}


def facts(
    *, step: int, consumed: int, position: int, loss: float, config_digest: str, seed: int, fingerprint: str | None,
    software: Mapping[str, Any], validated: int, metrics: Mapping[str, float],
    loss_scale: Mapping[str, Any], accepted_losses: Iterable[float], ranks: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the plain part of a checkpoint; `position`: as in `Positions`. `fingerprint`: that of the data, or None.

    `software`: `software_facts`. `validated`: the newest step with a validation. `metrics`: the workload's metrics of
    this step. `loss_scale`: state of float16 loss scaling. `accepted_losses`: the window by which spikes are judged.
    """
    return {
        "step": step,
        "consumed": consumed,
        "position": position,
        "loss": loss,
        "config_digest": config_digest,
        "seed": seed,
        "fingerprint": fingerprint,
        **software,
        "validated": validated,
        "metrics": dict(metrics),
        "accepted_losses": list(accepted_losses),
        "ranks": ranks,
        **OWN_BUFFERS,
        **({"loss_scale": dict(loss_scale)} if loss_scale else {}),
    }


SHARED_NAMES = "shared_names"
"""Key in a checkpoint's facts: other names of shared tensors -> the name under which each is saved."""


def shared_names(model: nn.Module) -> dict[str, str]:
    """Further names of `model.state_dict()` for parameters and buffers that have several (tied embeddings)."""
    kept, first, found = model.state_dict().keys(), dict[int, str](), dict[str, str]()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if name in kept and first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found
