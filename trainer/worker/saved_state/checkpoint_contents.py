"""Contents of a checkpoint: tensors, facts, expected entries and the weights' digest."""

import ctypes
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpointing.engine.audit.audit import TensorExpectations
from checkpointing.engine.state.fingerprints import digest_replicas
from checkpointing.format.manifest import Index, Manifest
from checkpointing.storage.digests import digest
from checkpointing.storage.durable import canonical
from trainer.parallel.apply.frozen_base import saved_parameters
from trainer.parallel.apply.mesh import Layout, all_gather_json
from trainer.worker.saved_state.rng_state import generators_fault, origin_fault, rng_name

TensorMetadata = list[Any]
"""A tensor's dtype, shape, device type, and whether it is sharded (None: like its parameter), in JSON."""


def tensor_metadata(tensor: torch.Tensor) -> TensorMetadata:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), tensor.device.type, isinstance(tensor, DTensor)]


def zeros(wanted: TensorMetadata, likes: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    """Return a zero tensor like `wanted`, sharded like the first match in `likes`.

    Return None if it must be sharded and nothing matches.
    """
    dtype, shape, kind, sharded = wanted
    for like in likes:
        if like is not None and list(like.shape) == shape and sharded in (None, isinstance(like, DTensor)):
            return torch.zeros_like(like, dtype=getattr(torch, dtype), requires_grad=False)
    if sharded:
        return None
    return torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu" if kind == "cpu" else device)


def differing_tensors(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of plain tensors that differ between ranks. Collective.

    If ranks have different names, shapes or types, all names are returned. DTensors never differ.
    """
    plain = {key: tensor for key, tensor in sorted(tensors.items()) if _has_values(tensor)}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return set()
    forms = canonical([[key, *tensor_metadata(tensor)] for key, tensor in plain.items()])
    form = int(digest(forms)[:15], 16)
    count, most, least, largest = _minimum(torch.tensor([len(plain), -len(plain), form, -form], device="cpu")).tolist()
    if (count, least) != (-most, -largest):
        return set(plain)
    if not plain:
        return set()
    mine = digest_replicas(list(plain.values())).cpu().to(torch.int64).flatten()
    lowest, highest = _minimum(torch.cat([mine, -mine])).view(2, -1, 2)
    differs = (lowest != -highest).any(dim=1).tolist()
    return {key for key, one in zip(plain, differs, strict=True) if one}


def _has_values(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has values to compare. The saver refuses tensors that cannot be saved."""
    plain = not isinstance(tensor, DTensor) and not is_traceable_wrapper_subclass(tensor)
    return plain and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _minimum(numbers: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
    return numbers


_GENERATORS = "rng/"
_MODEL, _OPTIMIZER = "model/", "optimizer/"


def expected_entries(manifest: Manifest) -> TensorExpectations:
    """Return what a checkpoint saved by orch must contain. For other checkpoints, nothing is required."""
    if "config_digest" not in manifest.extra:
        return TensorExpectations()
    ranks = manifest.world.get("ranks")

    def unusable(key: str, packed: Tensor) -> str:
        return generators_fault(packed) or origin_fault(packed, key, manifest.step)

    return TensorExpectations(
        required=tuple(rng_name(rank) for rank in range(ranks)) if isinstance(ranks, int) else (),
        readable={_GENERATORS: unusable},
        trained=trained_keys,
    )


def trained_keys(index: Index) -> set[str]:
    """Return the keys of the trained parameters, which are those with optimizer state."""
    holding = {key.removeprefix(_OPTIMIZER).partition("/")[0] for key in index.tensors if key.startswith(_OPTIMIZER)}
    return {key for key in index.tensors if key.startswith(_MODEL) and key.removeprefix(_MODEL) in holding}


def buffer_slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield every persistent buffer, even if it is None, as its full name, its module, and its name in the module."""
    for prefix, module in model.named_modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), module, name


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers, keyed by name. A shared buffer is listed under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, module, key in buffer_slots(model):
        buffer = module._buffers[key]
        if buffer is not None and id(buffer) not in seen:
            seen.add(id(buffer))
            found[name] = buffer
    return found


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return saved parameters and persistent buffers, keyed by `model/<name>`.

    A shared parameter has only its first name.
    """
    found = {f"model/{name}": parameter.detach() for name, parameter in saved_parameters(model)}
    found.update({f"model/{name}": buffer for name, buffer in persistent_buffers(model).items()})
    return found


def shared_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the `model_tensors` that all ranks share."""
    own = {f"model/{name}" for name in _own_buffers(model)}
    return {key: tensor for key, tensor in model_tensors(model).items() if key not in own}


def buffers_name(rank: int) -> str:
    return f"buffers/rank-{rank:05d}/"


def rank_buffers(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Return the buffers that may differ between ranks, such as statistics and counters, under this rank's keys."""
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


SHARED_NAMES = "shared_names"
"""Key in a checkpoint's facts for a map from other names of shared tensors to the names they are saved under."""


def shared_names(model: nn.Module) -> dict[str, str]:
    """Return the other `state_dict()` names of parameters and buffers with several names, such as tied embeddings."""
    kept, first, found = model.state_dict().keys(), dict[int, str](), dict[str, str]()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if name in kept and first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


_HASH_CHUNK = 64 * 1024 * 1024


def weights_digest(model: nn.Module, layout: Layout) -> str | None:
    """Return the XXH3-128 digest of all tensors in name order on rank 0, and None on other ranks. Collective."""
    tensors = _own_tensors(model) if layout.sizes["pp"] == 1 else _tensors_of_stages(model, layout)
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        if layout.rank == 0:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            update_digest(digest, tensor.cpu().contiguous())
    return digest.hexdigest() if layout.rank == 0 else None


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in sorted(model_tensors(model).items()):
        with _silence_redistribute_warning():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _tensors_of_stages(model: nn.Module, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of all stages on rank 0. Other ranks send theirs one at a time and yield nothing."""
    group, place = layout.pp.get_group(), layout.place["pp"]
    ranks = dist.get_process_group_ranks(group)
    tensors = {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in model_tensors(model).items()
    }
    known = [
        (*entry, stage)
        for stage, of_stage in enumerate(all_gather_json(tensors, layout.device, group))
        for entry in of_stage.items()
    ]
    own = _own_tensors(model)
    for name, (dtype, shape), stage in sorted(known, key=lambda one: one[0]):
        tensor = next(own)[1] if stage == place else None
        if ranks[0] != 0:
            continue  # if several pipelines hold the same weights, one is enough
        if place == 0:
            if tensor is None:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=layout.device)
                dist.recv(tensor, ranks[stage], group=group)
            yield name, tensor
        elif tensor is not None:
            dist.send(tensor.to(layout.device).contiguous(), ranks[0], group=group)


@contextmanager
def _silence_redistribute_warning() -> Iterator[None]:
    """Silence torch's warning that a doubly sharded tensor is gathered in two operations, which is fine here."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def update_digest(digest: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    """Add the bytes of a contiguous tensor in host memory."""
    size = tensor.numel() * tensor.element_size()
    for start in range(0, size, _HASH_CHUNK):
        digest.update(ctypes.string_at(tensor.data_ptr() + start, min(_HASH_CHUNK, size - start)))
