"""Detection of tensors with the same name but different values on different ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpointing.engine.state.fingerprints import digest_replicas
from checkpointing.storage.digests import digest
from checkpointing.storage.durable import canonical
from trainer.worker.saved_state.tensor_metadata import tensor_metadata


def differing_tensors(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Collective: return the names of the plain tensors that differ between ranks, the same names on every rank.

    If ranks have different names, shapes or types, all tensors count as different. DTensors are left out: they hold
    one value for all ranks.
    """
    plain = {key: tensor for key, tensor in sorted(tensors.items()) if _has_values(tensor)}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return set()
    forms = canonical([[key, *tensor_metadata(tensor)] for key, tensor in plain.items()])
    form = int(digest(forms)[:15], 16)
    count, most, least, largest = _minimum(torch.tensor([len(plain), -len(plain), form, -form])).tolist()
    if (count, least) != (-most, -largest):
        return set(plain)
    if not plain:
        return set()
    mine = digest_replicas(list(plain.values())).cpu().to(torch.int64).flatten()
    lowest, highest = _minimum(torch.cat([mine, -mine])).view(2, -1, 2)
    differs = (lowest != -highest).any(dim=1).tolist()
    return {key for key, one in zip(plain, differs, strict=True) if one}


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor has values to compare; the saver refuses tensors that cannot be saved."""
    plain = not isinstance(tensor, DTensor) and not is_traceable_wrapper_subclass(tensor)
    return plain and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _minimum(numbers: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
    return numbers
