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
        wanted = "'transformers>=5'" if package == "transformers" else package
        raise WorkloadError(f"workload hf needs {package}: pip install {wanted} ({error})") from error


class Weights:
    """Tensors of a pretrained model in safetensors files."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)
        """File of each tensor."""
        self._open: dict[str, Any] = {}

    @classmethod
    def find(cls, name_or_path: str) -> "Weights":
        """Find the files in a folder or in the hub's cache; like transformers, a single file first.

        Raises WorkloadError.
        """
        single = find_file(name_or_path, _WEIGHTS)
        if single is not None:
            return cls(dict.fromkeys(open_tensors(single).keys(), single))
        index = find_file(name_or_path, _INDEX)
        if index is None:
            raise WorkloadError(
                f"{WHERE}={name_or_path}: has no {_WEIGHTS}: type workload.args.pretrained=false for new weights"
            )
        places = read_description(index).get("weight_map")
        if not isinstance(places, dict):
            raise WorkloadError(f"{index}: has no weight_map: copy the file again")
        files = {file: find_file(name_or_path, file) for file in sorted(set(places.values()))}
        if absent := [file for file, path in files.items() if path is None]:
            raise WorkloadError(f"{index}: lists {absent[0]}, which is not there: copy the file again")
        return cls({name: str(files[file]) for name, file in places.items()})

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """Read a region of a tensor, or all of it."""
        file = self._file(name)
        part: torch.Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
        return part

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def is_plain_float(self, name: str) -> bool:
        """Return whether a tensor's values are its numbers, unlike those of quantized weights."""
        return self._slice(name).get_dtype() in ("F64", "F32", "F16", "BF16")

    def _slice(self, name: str) -> Any:
        try:
            return self._file(name).get_slice(name)
        except library("safetensors").SafetensorError as error:
            raise WorkloadError(f"{self.files[name]}: has no {name}, which the index lists: {error}") from error

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
        whole = {"tensors": found, "config": read_config(name_or_path), "settings": dict(settings)}
        return xxhash.xxh3_128(canonical(whole)).hexdigest()

    def _file(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open:
            self._open = {path: open_tensors(path)}
        return self._open[path]


def find_file(name_or_path: str, file: str) -> str | None:
    """Return the path of a file in a folder or in the hub's cache, or None."""
    found = library("transformers.utils").cached_file(
        name_or_path, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else str(found)


def open_tensors(path: str) -> Any:
    """Open a safetensors file. Raises WorkloadError if it is damaged."""
    safetensors = library("safetensors")
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise WorkloadError(f"{path}: is not a complete safetensors file: {error}: copy it again") from error


def read_description(path: str) -> dict[str, Any]:
    """Read a JSON object. Raises WorkloadError."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{path}: cannot be read: {error}: copy it again") from error
    if not isinstance(found, dict):
        raise WorkloadError(f"{path}: must be a JSON object, is a {type(found).__name__}: copy it again")
    return found


def read_config(name_or_path: str) -> dict[str, Any]:
    """Read `config.json`. Raises WorkloadError."""
    path = find_file(name_or_path, _CONFIG)
    if path is None:
        raise WorkloadError(f"{WHERE}={name_or_path}: has no {_CONFIG}, and no such name is in the hub's cache")
    return read_description(path)


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

    A new head is a child of the model of which the files have nothing. Call this before the model is sharded, which
    changes its class. Raises WorkloadError if another parameter is missing, or a shape differs.
    """
    tensors, sources = tensors_to_load(model), match_names(model, weights.files)
    known = {name.partition(".")[0] for name in sources}
    if lacking := [name for name in new_head(model, sources) if name.partition(".")[0] in known or not known]:
        why = "transformers makes it from other tensors or from code, which workload hf does not"
        raise WorkloadError(f"{WHERE}: its files have no {lacking[0]} ({len(lacking)} such parameters): {why}")
    for name, source in sources.items():
        if tensors[name].is_floating_point() and not weights.is_plain_float(source):
            raise WorkloadError(f"{WHERE}: {source} is quantized, which workload hf does not read: use full weights")
        shape, wanted = weights.shape(source), tuple(tensors[name].shape)
        if shape != wanted:
            raise WorkloadError(f"{WHERE}: {source} is {list(shape)}, the model's is {list(wanted)}")
    return sources


@torch.no_grad()
def load_pretrained(model: nn.Module, weights: Weights, sources: Mapping[str, str]) -> None:
    """Read this rank's part of each tensor in `sources`. Quantized weights are read whole, one at a time."""
    tensors, filled = tensors_to_load(model), dict[int, str]()
    # In the order of the files, so that each is opened once.
    for name in sorted(sources, key=lambda one: (weights.files[sources[one]], one)):
        tensor, source = tensors[name], sources[name]
        if is_quantized(tensor):
            copy_quantized(tensor, weights.read(source, ()).to(tensor.device))
        elif own_part(tensor).numel():
            part = weights.read(source, _own_region(tensor))
            if first := filled.get(id(tensor)):
                _require_equal(part, own_part(tensor), (first, source))
            own_part(tensor).copy_(part)
        filled[id(tensor)] = source


def _require_equal(part: torch.Tensor, before: torch.Tensor, names: tuple[str, str]) -> None:
    """Refuse two copies of a tied tensor with different values, of which transformers ties none."""
    if not torch.equal(part.to(before), before):
        why = f"{names[0]} and {names[1]} differ, but its configuration ties them"
        raise WorkloadError(f"{WHERE}: {why}: type +workload.args.settings.tie_word_embeddings=false")


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
