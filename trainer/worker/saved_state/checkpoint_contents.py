"""What is in a checkpoint: named tensors to be filled in place, and a few plain facts."""

import ctypes
import random
import sys
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

_RNG_BYTES = 16384
_NONE = torch.zeros(1, dtype=torch.uint8)  # in the place of a generator that is not there
_HASH_CHUNK = 64 * 1024 * 1024


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under `model/<name>`; a shared parameter stands under its first name."""
    kept = model.state_dict().keys()
    found = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    found.update({f"model/{name}": buffer for name, buffer in model.named_buffers() if name in kept})
    return found


def shared_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The part of `model_tensors` that is one value for all ranks together."""
    own = {f"model/{name}" for name in _own_buffers(model)}
    return {key: tensor for key, tensor in model_tensors(model).items() if key not in own}


def buffers_name(rank: int) -> str:
    return f"buffers/rank-{rank:05d}/"


def rank_buffers(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Buffers that differ between ranks, as the statistics of a batch norm do, under keys of this rank's own."""
    return {f"{buffers_name(rank)}{name}": buffer for name, buffer in _own_buffers(model).items()}


def _own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    kept = model.state_dict().keys()
    found = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {name: b for name, b in found.items() if b.is_floating_point() and not isinstance(b, DTensor)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the optimizer's state under `optimizer/<parameter>/<key>`; settings come from the config."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer/{name}/{key}"] = value
    return found


def without_state(model: nn.Module, absent: Collection[str]) -> list[nn.Parameter]:
    """The parameters of which a checkpoint, that lacks the keys `absent`, has no optimizer state."""
    names = {key.removeprefix("optimizer/").rpartition("/")[0] for key in absent if key.startswith("optimizer/")}
    return [parameter for name, parameter in model.named_parameters() if name in names]


def rng_name(rank: int) -> str:
    return f"rng/rank-{rank:05d}"


def pack_rng(device: torch.device) -> torch.Tensor:
    """The generators of torch (host and device), Python and, where it is loaded, NumPy, as one row of fixed length."""
    version, numbers, gauss = random.getstate()
    assert version == 3
    python = torch.tensor([int(number) for number in numbers], dtype=torch.int64)
    extra = torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64)
    parts = [torch.get_rng_state(), python.view(torch.uint8), extra.view(torch.uint8)]
    parts.append(torch.cuda.get_rng_state(device) if device.type == "cuda" else _NONE)
    parts.append(_pack_numpy())
    packed = torch.zeros(_RNG_BYTES, dtype=torch.uint8)
    place = 0
    for part in parts:
        header = torch.tensor([len(part)], dtype=torch.int64).view(torch.uint8)
        packed[place : place + 8 + len(part)] = torch.cat([header, part])
        place += 8 + len(part)
    return packed


def _pack_numpy() -> torch.Tensor:
    """NumPy's global generator: its words, position, and the second half of a pair of normal numbers."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return _NONE
    kind, words, place, has_gauss, gauss = numpy.random.get_state(legacy=True)
    if kind != "MT19937":
        return _NONE
    numbers = torch.tensor([*words.tolist(), place, has_gauss], dtype=torch.int64).to(torch.int32)
    return torch.cat([numbers.view(torch.uint8), torch.tensor([gauss], dtype=torch.float64).view(torch.uint8)])


def _unpack_numpy(part: torch.Tensor) -> None:
    if len(part) == len(_NONE):
        return
    import numpy as np  # only where the run that saved had loaded it

    *words, place, has_gauss = (number & 0xFFFFFFFF for number in part[:-8].clone().view(torch.int32).tolist())
    gauss = float(part[-8:].clone().view(torch.float64))
    np.random.set_state(("MT19937", words, place, has_gauss, gauss))


def unpack_rng(packed: torch.Tensor, device: torch.device) -> None:
    """Put the generators back to where `pack_rng` found them."""
    parts, place = [], 0
    while length := int(packed[place : place + 8].clone().view(torch.int64)):
        parts.append(packed[place + 8 : place + 8 + length].clone())
        place += 8 + length
    torch.set_rng_state(parts[0])
    gauss = float(parts[2].view(torch.float64))
    random.setstate((3, tuple(parts[1].view(torch.int64).tolist()), None if gauss != gauss else gauss))
    if device.type == "cuda" and len(parts) > 3 and len(parts[3]) > len(_NONE):
        torch.cuda.set_rng_state(parts[3], device)
    if len(parts) > 4:
        _unpack_numpy(parts[4])


def facts(
    *, step: int, consumed: int, left_out: int, loss: float, config_digest: str, seed: int, fingerprint: str | None
) -> dict[str, Any]:
    """The plain part of a checkpoint; `fingerprint` is that of the data, None when the data has none.

    `left_out`: batches before the position `consumed` that no step was trained with.
    """
    return {
        "step": step,
        "consumed": consumed,
        "left_out": left_out,
        "loss": loss,
        "config_digest": config_digest,
        "seed": seed,
        "fingerprint": fingerprint,
    }


def weights_digest(model: nn.Module) -> str | None:
    """XXH3-128 over the full tensors in the order of their names: the same in every layout. None but on rank 0.

    A collective: every rank must call it.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model_tensors(model).items()):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            digest.update(f"{name} {full.dtype} {tuple(full.shape)}\n".encode())
            _feed(digest, full.cpu().contiguous())
    return digest.hexdigest() if dist.get_rank() == 0 else None


def _feed(digest: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    size = tensor.numel() * tensor.element_size()
    for start in range(0, size, _HASH_CHUNK):
        digest.update(ctypes.string_at(tensor.data_ptr() + start, min(_HASH_CHUNK, size - start)))
