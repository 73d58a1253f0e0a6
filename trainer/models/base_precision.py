"""Precision of a frozen base model: floating point, or int8 and nf4 weights of torchao in its linear layers.

int8 has a scale for each row. nf4 is QLoRA's 4-bit type (Dettmers et al. 2023): blocks of 64 values with a scale each,
and these scales again in blocks. Blocks never cross rows, so the values do not depend on how rows are sharded.
"""

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer.parallel.apply.gradient_buckets import like_own_part, own_part
from trainer.parallel.apply.mesh import Layout
from trainer.worker.workload import WorkloadError

_BLOCK, _MOST_SCALES = 64, 256


def _int8(weight: Tensor) -> Any:
    return _torchao("torchao.prototype.quantized_training.int8").Int8QuantizedTrainingLinearWeight.from_float(weight)


def _nf4(weight: Tensor) -> Any:
    rows, columns = weight.shape
    if columns % _BLOCK:
        raise WorkloadError(f"workload.args.base=nf4: a layer has {columns} inputs, not a multiple of {_BLOCK}: int8")
    library = _torchao("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    return library.to_nf4(weight, _BLOCK, math.gcd(_MOST_SCALES, columns // _BLOCK))


QUANTIZERS: dict[str, Callable[[Tensor], Any]] = {"int8": _int8, "nf4": _nf4}
PRECISIONS = ("float32", "bfloat16", "float16", *QUANTIZERS)
"""Values of `workload.args.base`."""


def _torchao(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise WorkloadError(f"workload.args.base=int8 and nf4 need torchao: pip install torchao ({error})") from error


def is_quantized(parameter: Tensor) -> bool:
    return is_traceable_wrapper_subclass(own_part(parameter))


def quantize_layers(layers: Iterable[nn.Module], kind: str) -> int:
    """Replace the frozen weights of linear layers by quantized ones without values; return how many."""
    count = 0
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear) and not module.weight.requires_grad:
                # The scales of int8 are float32, whatever the file has.
                blank = QUANTIZERS[kind](torch.empty(module.weight.shape, dtype=torch.float32, device="meta"))
                module.weight = nn.Parameter(blank, requires_grad=False)
                count += 1
    return count


def quantize(weight: Tensor, like: Tensor) -> Any:
    """Quantize a whole weight as the parameter `like` is. Shape [outputs, inputs]."""
    return QUANTIZERS["nf4" if _is_nf4(like) else "int8"](weight.to(torch.float32))


def _is_nf4(weight: Tensor) -> bool:
    return type(own_part(weight)).__name__.startswith("NF4")


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return uninitialized memory for a parameter or buffer on the meta device, sharded and quantized like it."""
    if not is_quantized(tensor):
        return torch.empty_like(tensor, device=device)
    part: Any = own_part(tensor)
    names, context = part.__tensor_flatten__()
    if isinstance(context, dict):  # of nf4, which also has the device
        context = {**context, "tensor_meta": replace(context["tensor_meta"], device=device)}
    inner = {name: torch.empty_like(getattr(part, name), device=device) for name in names}
    made = type(part).__tensor_unflatten__(inner, context, part.shape, part.stride())
    return like_own_part(made, tensor)


def keep_whole(model: nn.Module, layout: Layout, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the quantized weights if no ranks share them: FSDP2 of torch 2.13 fails to gather them from one rank.

    Their results have `dtype`, to which FSDP would cast the scales of int8.
    """
    if layout.fsdp.size(layout.fsdp.ndim - 1) > 1:
        return []
    found = []
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and is_quantized(weight):
            if not _is_nf4(weight):  # which takes the type of its input
                module.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            found.append(module.get_parameter("weight"))
    return found


def check_rows(model: nn.Module) -> None:
    """Raise WorkloadError for a sharded quantized weight whose rows are not divided evenly."""
    for name, parameter in model.named_parameters():
        if is_quantized(parameter) and isinstance(parameter, DTensor):
            for dimension, placement in enumerate(parameter.placements):
                ranks = parameter.device_mesh.size(dimension)
                if placement.is_shard() and parameter.shape[0] % ranks:
                    why = f"{name} has {parameter.shape[0]} rows, not a multiple of the {ranks} ranks of FSDP"
                    raise WorkloadError(f"workload.args.base: {why}: type workload.args.base=bfloat16")


def copy_quantized(parameter: Tensor, whole: Tensor) -> None:
    """Quantize a whole weight and keep this rank's rows of it."""
    part: Any = own_part(parameter)
    made = quantize(whole, parameter)
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard():
                made = torch.chunk(made, parameter.device_mesh.size(dimension))[coordinate[dimension]]
    for name in part.__tensor_flatten__()[0]:
        getattr(part, name).copy_(getattr(made, name))


def dequantize(weight: Any) -> Tensor:
    """Return the float32 values of a quantized weight."""
    found: Tensor = weight.get_original_weight() if hasattr(weight, "get_original_weight") else weight.dequantize()
    return found.to(torch.float32)
