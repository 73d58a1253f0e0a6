"""Pretrained weights of transformers: each rank reads its part of each tensor from safetensors files."""

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from checkpointing.storage.durable import canonical
from trainer.models.base_precision import copy_quantized, is_quantized
from trainer.models.llama import fill
from trainer.parallel.apply.gradient_buckets import own_part
from trainer.parallel.apply.mesh import Layout, all_gather_json
from trainer.worker.saved_state.checkpoint_contents import update_digest
from trainer.worker.workload import WorkloadError

WHERE = "workload.args.name_or_path"
_CONFIG, _INDEX, _WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"


def library(name: str) -> ModuleType:
    """Import a library that orch itself does not need. Raises WorkloadError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise WorkloadError(f"workload hf needs {package}: pip install {package} ({error})") from error


class Weights:
    """Tensors of a pretrained model in safetensors files."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)
        """File of each tensor."""
        self._open: dict[str, Any] = {}

    @classmethod
    def find(cls, name_or_path: str) -> "Weights":
        """Find the files in a folder or in the hub's cache. Raises WorkloadError."""
        cached_file, quiet = (
            library("transformers.utils").cached_file,
            {"_raise_exceptions_for_missing_entries": False},
        )
        index = cached_file(name_or_path, _INDEX, **quiet)
        if index is not None:
            places: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            files = {file: cached_file(name_or_path, file) for file in sorted(set(places.values()))}
            return cls({name: str(files[file]) for name, file in places.items()})
        single = cached_file(name_or_path, _WEIGHTS, **quiet)
        if single is None:
            raise WorkloadError(
                f"{WHERE}={name_or_path}: has no {_WEIGHTS}: type workload.args.pretrained=false for new weights"
            )
        with library("safetensors").safe_open(single, framework="pt") as file:
            return cls(dict.fromkeys(file.keys(), str(single)))

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """Read a region of a tensor, or all of it."""
        file = self._file(name)
        part: torch.Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
        return part

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def digest(self, name_or_path: str, settings: Mapping[str, Any], layout: Layout | None = None) -> str:
        """Return the XXH3-128 digest of all tensors and of the configuration.

        With a layout, it is collective, and each rank reads a part.
        """
        own, (rank, ranks) = {}, (layout.rank, layout.world_size) if layout is not None else (0, 1)
        for name in sorted(self.files, key=lambda one: (self.files[one], one))[rank::ranks]:
            tensor, part = self._file(name).get_tensor(name), xxhash.xxh3_128()
            part.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            update_digest(part, tensor)
            own[name] = part.hexdigest()
        parts = all_gather_json(own, layout.device) if layout is not None and dist.is_initialized() else [own]
        found = {name: part for of_rank in parts for name, part in of_rank.items()}
        described = library("transformers.utils").cached_file(name_or_path, _CONFIG)
        config = json.loads(Path(described).read_text(encoding="utf-8"))
        whole = {"tensors": found, "config": config, "settings": dict(settings)}
        return xxhash.xxh3_128(canonical(whole)).hexdigest()

    def _file(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open:
            self._open = {path: library("safetensors").safe_open(path, framework="pt")}
        return self._open[path]


def is_adapter(name: str) -> bool:
    """Return whether a parameter is peft's, beside the model's own."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """Return the name that a parameter has without adapters."""
    return name.replace(".base_layer.", ".")


def tensors_to_load(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers under all of their names, without adapters."""
    kept = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in kept.items() if isinstance(tensor, torch.Tensor) and not is_adapter(name)}


def new_head(model: nn.Module, sources: Mapping[str, str]) -> list[str]:
    """Return the parameters of the model that no file has, under their first names."""
    found = {id(tensor) for name, tensor in tensors_to_load(model).items() if name in sources}
    return [name for name, one in model.named_parameters() if id(one) not in found and not is_adapter(name)]


def find_sources(model: nn.Module, weights: Weights) -> dict[str, str]:
    """Return the name in the files of each tensor, except those of a new head, which no file has.

    Call it before the model is sharded, which changes its class. Raises WorkloadError if another parameter is missing,
    or a shape differs.
    """
    tensors, sources = tensors_to_load(model), match_names(model, weights.files)
    missing, base = new_head(model, sources), f"{getattr(model, 'base_model_prefix', '')}."
    if lacking := [name for name in missing if name.startswith(base) or len(sources) < len(missing)]:
        why = "transformers makes it from other tensors or from code, which workload hf does not"
        raise WorkloadError(f"{WHERE}: its files have no {lacking[0]} ({len(lacking)} such parameters): {why}")
    for name, source in sources.items():
        shape, wanted = weights.shape(source), tuple(tensors[name].shape)
        if shape != wanted:
            raise WorkloadError(f"{WHERE}: {source} is {list(shape)}, the model's is {list(wanted)}")
    return sources


@torch.no_grad()
def load_pretrained(model: nn.Module, weights: Weights, sources: Mapping[str, str]) -> None:
    """Read this rank's part of each tensor in `sources`. Quantized weights are read whole, one at a time."""
    tensors = tensors_to_load(model)
    # In the order of the files, so that each is opened once.
    for name in sorted(sources, key=lambda one: (weights.files[sources[one]], one)):
        tensor, source = tensors[name], sources[name]
        if is_quantized(tensor):
            copy_quantized(tensor, weights.read(source, ()).to(tensor.device))
        elif own_part(tensor).numel():
            own_part(tensor).copy_(weights.read(source, _own_region(tensor)))


@torch.no_grad()
def fill_head(model: nn.Module, names: Iterable[str], seed: int) -> None:
    """Give the parameters of a new head their initial values."""
    deviation = float(getattr(model.config, "initializer_range", 0.02))
    for name in names:
        ones = "norm" in name.lower() and name.endswith("weight")
        fill(name, model.get_parameter(name), seed, None if ones else 0.0 if name.endswith("bias") else deviation)


def match_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the name in the files of each tensor that they have, by the renamings that transformers applies.

    Tensors that transformers would stack or split are left out.
    """
    known = {plain_name(name): name for name in tensors_to_load(model)}
    mapping = library("transformers.conversion_mapping").get_model_conversion_mapping(model)
    loading = library("transformers.core_model_loading")
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    found = {}
    for name in names:
        renamed, converted = loading.rename_source_key(
            name, renamings, converters, getattr(model, "base_model_prefix", ""), known
        )
        if renamed in known and converted is None:
            found[known[renamed]] = name
    return found


def _own_region(parameter: torch.Tensor) -> tuple[slice, ...]:
    """Return the part of a parameter on this rank."""
    if not isinstance(parameter, DTensor):
        return ()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
