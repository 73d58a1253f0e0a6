"""Export of a LoRA run: adapters merged into the base model, or the adapters alone in the files of peft."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from checkpointing.engine.audit.sealed_checkpoint import SealedCheckpoint
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import Manifest
from trainer.models.base_precision import QUANTIZERS, dequantize, is_quantized
from trainer.models.hf_workload import HfWorkload
from trainer.models.lora import ADAPTER, adapted_modules
from trainer.models.pretrained_weights import Weights, find_sources, is_adapter, plain_name, tensors_to_load
from trainer.parallel.apply.frozen_base import FROZEN_BASE
from trainer.protocol.config import JobConfig
from trainer.worker import workload as workloads
from trainer.worker.workload import WorkloadError

_MODEL = "model/"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def has_adapters(source: SealedCheckpoint, config: JobConfig | None) -> bool:
    """Return whether a checkpoint has only adapters, and perhaps a new head."""
    return config is not None and FROZEN_BASE in source.manifest.extra and "lora" in config.workload.args


def adapter_name(name: str) -> str:
    """Return an adapter's name in the files of peft."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}', '')}"


def adapter_config(config: JobConfig) -> dict[str, Any]:
    """Return peft's description of the adapters."""
    args = config.workload.args
    tasks = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM", "sequence-classification": "SEQ_CLS"}
    task = tasks.get(args.get("task", "causal-lm"))
    return {
        "peft_type": "LORA", "base_model_name_or_path": args["name_or_path"], "task_type": task, "bias": "none",
        "inference_mode": True, **args["lora"],
    }  # fmt: skip


class MergedModel:
    """A checkpoint of adapters as the whole model that it stands for, in float32, one tensor at a time."""

    def __init__(self, source: SealedCheckpoint, config: JobConfig) -> None:
        """Find the base model. Raises CheckpointRefused if it is missing, has changed, or a library is missing."""
        self._source = source
        self.fingerprints: Mapping[str, str] = {}
        try:
            with workloads.users_code(f"making {config.workload.target}"):
                made = workloads.build(config)
            assert isinstance(made, HfWorkload)
            self._base, self._model = made.base, made.build_model()
            self._weights = Weights.find(made.name_or_path)
            self._sources = find_sources(self._model, self._weights)
            found = self._weights.digest(made.name_or_path, made.base_settings)
        except WorkloadError as error:
            raise CheckpointRefused(
                source.manifest.name, f"cannot be merged here: {error}; or use --to peft"
            ) from error
        saved = source.manifest.extra.get(FROZEN_BASE)
        if found != saved:
            why = (
                f"was trained beside another base model than {made.name_or_path} has now (digest {found}, was {saved})"
            )
            raise CheckpointRefused(source.manifest.name, f"{why}: put the original files back, or use --to peft")
        self._tensors = self._named_tensors()
        self._adapted: dict[str, tuple[str, Any]] = {
            f"{name}.base_layer.weight": (name, module) for name, module in adapted_modules(self._model)
        }

    def _named_tensors(self) -> dict[str, str]:
        """Return the model's own name of each tensor, keyed by its name without adapters; shared ones once."""
        found, seen = {}, set[int]()
        for name, tensor in tensors_to_load(self._model).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[plain_name(name)] = name
        return found

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    @property
    def manifest(self) -> Manifest:
        return self._source.manifest

    def dtype(self, key: str) -> torch.dtype:
        kind = self._like(key).dtype
        return torch.float32 if kind.is_floating_point else kind

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._like(key).shape)

    def blocks(self, key: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        value = self._value(self._tensors[key]).to(self.dtype(key)).contiguous()
        yield value, (0,) * value.dim()

    def _like(self, key: str) -> Tensor:
        return tensors_to_load(self._model)[self._tensors[key]]

    def _value(self, name: str) -> Tensor:
        """Return a tensor as training used it, with what its adapter adds."""
        if f"{_MODEL}{name}" in self._source.index.tensors:  # a new head, or a buffer
            return self._read(name)
        if name not in self._sources:
            raise CheckpointRefused(self.manifest.name, f"{name} is neither in it nor in the base model")
        base, like = self._weights.read(self._sources[name], ()), tensors_to_load(self._model)[name]
        if is_quantized(like):
            base = dequantize(QUANTIZERS[self._base](base.to(torch.float32)))
        elif like.is_floating_point():
            base = base.to(like.dtype).to(torch.float32)
        if name in self._adapted:
            place, module = self._adapted[name]
            base = base + self._change(place, module)
        return base

    def _change(self, place: str, module: nn.Module) -> Tensor:
        """Return what an adapter adds to its module's weight."""
        for name, _ in list(module.named_parameters()):
            if is_adapter(f".{name}"):
                owner, _, last = name.rpartition(".")
                value = nn.Parameter(self._read(f"{place}.{name}"), requires_grad=False)
                module.get_submodule(owner).register_parameter(last, value)
        with torch.no_grad():
            change: Tensor = module.get_delta_weight(ADAPTER)  # type: ignore[operator]
        return change.to(torch.float32)

    def _read(self, name: str) -> Tensor:
        key = f"{_MODEL}{name}"
        return torch.cat([block.flatten() for block, _ in self._source.blocks(key)]).view(self._source.shape(key))
