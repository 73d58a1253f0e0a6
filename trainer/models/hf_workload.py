"""`workload: hf`: a model of Hugging Face's transformers, sharded by orch, on token shards or on your own data.

Pretrained weights are read tensor by tensor, and each rank reads only its part of them.
"""

import fnmatch
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.models.llama import fill, summed_cross_entropy
from trainer.parallel.apply.data_parallel import apply_data_parallel, mixed_precision, offloads_all
from trainer.parallel.apply.fsdp_units import CannotShard, class_name, fsdp_units
from trainer.parallel.apply.gradient_buckets import own_part
from trainer.parallel.apply.mesh import Layout
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import RecomputeConfig
from trainer.worker.workload import BaseWorkload, WorkloadError

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
}
"""Classes of transformers, keyed by `workload.args.task`."""
_WHERE = "workload.args.name_or_path"
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"


class HfWorkload(BaseWorkload):
    """Model of transformers, from pretrained weights or from its configuration with the run's seed.

    `loss` expects token shards and a causal language model, or batches that are mappings of the model's arguments.
    """

    def __init__(
        self, config: JobConfig, *, name_or_path: str, task: str = "causal-lm", pretrained: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`name_or_path`: a folder or a name in the hub's cache; `settings` replace values of its configuration."""
        super().__init__(config, name_or_path=name_or_path, task=task, pretrained=pretrained, settings=settings)
        if task not in TASKS:
            raise WorkloadError(f"workload.args.task={task}: must be one of {', '.join(TASKS)}")
        self.name_or_path, self.task, self.pretrained = os.path.expanduser(str(name_or_path)), task, pretrained
        self.settings = dict(settings or {})
        if config.train.compile:
            raise WorkloadError("train.compile=true: workload hf does not compile: type train.compile=false")
        if config.train.recompute != RecomputeConfig():
            raise WorkloadError("train.recompute: workload hf recomputes whole layers: leave train.recompute out")

    def build_model(self) -> nn.Module:
        transformers = _library("transformers")
        if self.name_or_path.startswith(("/", ".")) and not os.path.isdir(self.name_or_path):
            raise WorkloadError(f"{_WHERE}={self.name_or_path}: no such folder on this node")
        try:
            made = transformers.AutoConfig.from_pretrained(self.name_or_path, **self.settings)
        except (OSError, ValueError) as error:
            raise WorkloadError(f"{_WHERE}={self.name_or_path}: {str(error).splitlines()[0]}") from error
        made.use_cache = False
        with parameters_on_meta() if self.pretrained else nullcontext():
            model: nn.Module = getattr(transformers, TASKS[self.task]).from_config(made, dtype=torch.float32)
        if self.config.train.activation_checkpointing:
            try:
                model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            except ValueError as error:
                raise WorkloadError(f"train.activation_checkpointing=true: {error}") from error
        return model

    def parallelize(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Apply the model's own tensor-parallel plan, then FSDP to its layers. The weights are read last."""
        for name in ("cp", "pp", "ep"):
            if layout.sizes.get(name, 1) > 1:
                key = "pipeline.stages" if name == "pp" else name
                raise WorkloadError(f"parallel.{key}: must be 1 for workload hf; the built-in model supports it")
        if layout.sizes["tp"] > 1:
            split_by_plan(model, layout.tp)
        if not self.pretrained:
            model.to(layout.device)
        try:
            apply_data_parallel(find_layers(model), model, layout, self.config, mixed_precision(self.config))
        except CannotShard as error:
            raise WorkloadError(str(error)) from error
        if self.pretrained:
            device = torch.device("cpu") if offloads_all(self.config) else layout.device
            model._apply(
                lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
            )
            _tie(model)
            load_pretrained(model, Weights.find(self.name_or_path), self.config.train.seed)
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the model's own loss of a mapping, or the cross-entropy of tokens 1.. given tokens 0.. in float32."""
        if isinstance(batch, Mapping):
            loss: torch.Tensor = model(**batch).loss
            return loss
        targets = batch[:, 1:]
        logits = model(input_ids=batch[:, :-1]).logits
        mean: torch.Tensor = summed_cross_entropy(logits.flatten(0, 1), targets.flatten()) / targets.numel()
        return mean


def _library(name: str) -> ModuleType:
    """Import a library that orch itself does not need. Raises WorkloadError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WorkloadError(f"workload hf needs transformers: pip install transformers ({error})") from error


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create parameters without values, and buffers with theirs, which no file has (rotary tables)."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's FSDP units: the layers that transformers never splits, else its children."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if class_name(module) in classes]
    return found or fsdp_units(model)


def _tie(model: nn.Module) -> None:
    if callable(tie := getattr(model, "tie_weights", None)):
        tie()


# -- tensor parallelism


class Replicated(ParallelStyle):
    """Style of a module that every rank computes whole, from the same activations."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, device_mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def enter(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                DTensor.from_local(one, device_mesh, [Replicate()], run_check=False)
                if isinstance(one, torch.Tensor) and not isinstance(one, DTensor)
                else one
                for one in given
            )

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda _, __, out: out.to_local() if isinstance(out, DTensor) else out)
        return module


STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""Styles of transformers' plans; the last one is a norm over heads [batch, length, heads, width]."""


def split_by_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model on the CPU or the meta device by its own plan. Raises WorkloadError if it has none."""
    kind, plan = type(model).__name__, _plan(model)
    if not plan:
        raise WorkloadError(f"parallel.tp={mesh.size()}: {kind} has no tensor-parallel plan: type parallel.tp=1")
    if unknown := sorted(set(plan.values()) - STYLES.keys()):
        why = f"the plan of {kind} has {unknown[0]}, which orch does not support"
        raise WorkloadError(f"parallel.tp={mesh.size()}: {why}: type parallel.tp=1")
    _check_sizes(model, mesh.size())
    tied = bool(getattr(model.config, "tie_word_embeddings", False))  # the output has the embedding's parameter
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.named_parameters(recurse=False)):
            continue
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        is_tied = tied and module is model.get_output_embeddings()  # type: ignore[operator]
        styles[name] = Replicated() if style is None or is_tied else STYLES[style]
    parallelize_module(model, mesh, styles)
    _tie(model)


def _plan(model: nn.Module) -> dict[str, str]:
    """Return the styles of modules, keyed by patterns of their names in the whole model."""
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if hasattr(model, base) and base else ""
    found = {
        f"{prefix}{name}": style for name, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items()
    }
    return {**found, **(type(model).__dict__.get("_tp_plan") or {})} if found else {}


def _check_sizes(model: nn.Module, ranks: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = getattr(model.config, key, None)
        if isinstance(size, int) and size % ranks:
            raise WorkloadError(f"the model's {key}={size}: must be a multiple of parallel.tp={ranks}")


# -- weights


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
            _library("transformers.utils").cached_file,
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
                f"{_WHERE}={name_or_path}: has no {_WEIGHTS}: type workload.args.pretrained=false for new weights"
            )
        with _library("safetensors").safe_open(single, framework="pt") as file:
            return cls(dict.fromkeys(file.keys(), str(single)))

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """Read a region of a tensor, or all of it."""
        part: torch.Tensor = self._file(name).get_slice(name)[region or slice(None)]
        return part

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def _file(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open:
            self._open = {path: _library("safetensors").safe_open(path, framework="pt")}
        return self._open[path]


@torch.no_grad()
def load_pretrained(model: nn.Module, weights: Weights, seed: int) -> list[str]:
    """Read this rank's part of each parameter, and return the names of those of a new head, which no file has.

    These get initial values. Raises WorkloadError if another parameter is missing, or a shape differs.
    """
    names = [name for name, _ in model.named_parameters()]
    sources = match_names(model, weights.files)
    missing, base = [name for name in names if name not in sources], f"{getattr(model, 'base_model_prefix', '')}."
    if lacking := [name for name in missing if name.startswith(base) or len(sources) < len(missing)]:
        hint = "models whose files transformers converts, such as Mixtral, need the built-in model"
        raise WorkloadError(f"{_WHERE}: its files have no {lacking[0]} ({len(lacking)} such parameters): {hint}")
    # In the order of the files, so that each is opened once.
    for name in sorted(sources, key=lambda one: (weights.files[sources[one]], one)):
        parameter = model.get_parameter(name)
        shape = weights.shape(sources[name])
        if shape != tuple(parameter.shape):
            raise WorkloadError(f"{_WHERE}: {sources[name]} is {list(shape)}, the model's is {list(parameter.shape)}")
        if own_part(parameter).numel():
            own_part(parameter).copy_(weights.read(sources[name], _own_region(parameter)))
    deviation = float(getattr(model.config, "initializer_range", 0.02))
    for name in missing:
        ones = "norm" in name.lower() and name.endswith("weight")
        fill(name, model.get_parameter(name), seed, None if ones else 0.0 if name.endswith("bias") else deviation)
    return missing


def match_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the name in the files of each parameter that they have, by the renamings that transformers applies.

    Tensors that transformers would stack or split are left out.
    """
    known = dict(model.named_parameters())
    mapping = _library("transformers.conversion_mapping").get_model_conversion_mapping(model)
    loading = _library("transformers.core_model_loading")
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    found = {}
    for name in names:
        renamed, converted = loading.rename_source_key(
            name, renamings, converters, getattr(model, "base_model_prefix", ""), known
        )
        if renamed in known and converted is None:
            found[renamed] = name
    return found


def _own_region(parameter: torch.Tensor) -> tuple[slice, ...]:
    """Return the part of a parameter on this rank."""
    if not isinstance(parameter, DTensor):
        return ()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
