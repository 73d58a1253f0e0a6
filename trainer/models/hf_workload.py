"""`workload: hf`: a model of Hugging Face's transformers, sharded by orch, on token shards or on your own data.

Pretrained weights are read tensor by tensor, and each rank reads only its part of them.
"""

import fnmatch
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.models.base_precision import PRECISIONS, QUANTIZERS, check_rows, empty_like, keep_whole, quantize_layers
from trainer.models.llama import summed_cross_entropy
from trainer.models.lora import add_adapters, check_settings, fill_adapters
from trainer.models.pretrained_weights import (
    WHERE,
    Weights,
    fill_head,
    find_sources,
    library,
    load_pretrained,
    new_head,
    read_config,
)
from trainer.parallel.apply.data_parallel import apply_data_parallel, mixed_precision, offloads_all
from trainer.parallel.apply.frozen_base import FrozenBase, mark_frozen_base
from trainer.parallel.apply.fsdp_units import CannotShard, fsdp_units, units_of_known_classes
from trainer.parallel.apply.mesh import Layout
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import RecomputeConfig
from trainer.protocol.token_shards import TokenIndex
from trainer.worker.data import Data, MaskedTokens, StatefulData
from trainer.worker.workload import BaseWorkload, WorkloadError

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
}
"""Classes of transformers, keyed by `workload.args.task`."""
CONFIG_STATE = "config.json"
"""Key of the model's configuration in the workload's state."""
_NO_PART_OF_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")


class HfWorkload(BaseWorkload):
    """Model of transformers, from pretrained weights or from its configuration with the run's seed.

    `loss` expects token shards and a causal language model, or batches that are mappings of the model's arguments.
    """

    def __init__(
        self, config: JobConfig, *, name_or_path: str, task: str = "causal-lm", pretrained: bool = True,
        settings: Mapping[str, Any] | None = None, lora: Mapping[str, Any] | None = None, base: str | None = None,
    ) -> None:  # fmt: skip
        """`name_or_path`: a folder or a name in the hub's cache; `settings` replace values of its configuration.

        `lora`: settings of `peft.LoraConfig`; only adapters are trained and saved. `base`: precision of the frozen
        model, by default `train.dtype`.
        """
        super().__init__(
            config, name_or_path=name_or_path, task=task, pretrained=pretrained, settings=settings, lora=lora, base=base
        )
        for name, value, kind in (("pretrained", pretrained, bool), ("settings", settings or {}, Mapping)):
            if not isinstance(value, kind):
                raise WorkloadError(f"workload.args.{name}={value}: must be a {kind.__name__.lower()}")
        if task not in TASKS:
            raise WorkloadError(f"workload.args.task={task}: must be one of {', '.join(TASKS)}")
        self.name_or_path, self.task, self.pretrained = os.path.expanduser(str(name_or_path)), task, pretrained
        self.settings = dict(settings or {})
        self._weights: Weights | WorkloadError = WorkloadError("the weights were not looked for")
        self._sources: dict[str, str] = {}
        self._description: dict[str, Any] = {}
        self.lora, self.base = lora, base or config.train.dtype
        self._check_lora(base)
        if task != "causal-lm" and type(self).build_data is HfWorkload.build_data:
            raise WorkloadError(
                f"workload.args.task={task}: token shards are for causal-lm: derive a class with its data"
            )
        if config.train.compile:
            raise WorkloadError("train.compile=true: workload hf does not compile: type train.compile=false")
        if config.train.recompute != RecomputeConfig():
            raise WorkloadError("train.recompute: workload hf recomputes whole layers: leave train.recompute out")

    def _check_lora(self, base: str | None) -> None:
        if self.lora is None:
            if base is not None:
                raise WorkloadError("workload.args.base: is for a frozen model: type workload.args.lora.r=8")
            return
        check_settings(self.lora)
        if self.base not in PRECISIONS:
            raise WorkloadError(f"workload.args.base={self.base}: must be one of {', '.join(PRECISIONS)}")
        if not self.pretrained:
            raise WorkloadError("workload.args.lora: trains beside pretrained weights: type pretrained=true")
        if self.config.parallel.tp > 1:
            raise WorkloadError("workload.args.lora: adapters are not split by tensor parallelism: type parallel.tp=1")

    def build_model(self) -> nn.Module:
        transformers = library("transformers")
        made = self._read_config(transformers)
        kind = getattr(transformers, TASKS[self.task])
        try:
            with parameters_on_meta() if self.pretrained else nullcontext():
                model: nn.Module = kind.from_config(made, dtype=self._dtype)
        except (ValueError, TypeError) as error:
            why = f"transformers makes no {TASKS[self.task]} of model_type {made.model_type!r} with these settings"
            raise WorkloadError(f"workload.args.task={self.task}: {why}: {_first_line(error)}") from error
        if self.config.train.activation_checkpointing:
            try:
                model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            except ValueError as error:
                raise WorkloadError(f"train.activation_checkpointing=true: {error}") from error
        if self.lora is not None:
            self._freeze(model, self.lora)
        return model

    def _read_config(self, transformers: Any) -> Any:
        """Return the configuration of transformers. Raises WorkloadError."""
        if self.name_or_path.startswith(("/", ".")) and not os.path.isdir(self.name_or_path):
            raise WorkloadError(f"{WHERE}={self.name_or_path}: no such folder on this node")
        self._description = read_config(self.name_or_path)
        try:
            made = transformers.AutoConfig.from_pretrained(self.name_or_path, trust_remote_code=False)
            unknown = [key for key in self.settings if not hasattr(made, key) or key in ("rope_scaling", "rope_theta")]
            if not unknown:
                made = transformers.AutoConfig.from_pretrained(self.name_or_path, **self.settings)
        except (OSError, ValueError, TypeError, library("huggingface_hub.errors").StrictDataclassError) as error:
            raise WorkloadError(f"{WHERE}={self.name_or_path}: {_first_line(error)}") from error
        if unknown:
            remedy = "rope_parameters" if unknown[0].startswith("rope") else "a key of its config.json"
            raise WorkloadError(
                f"workload.args.settings.{unknown[0]}: {made.model_type} does not read it: use {remedy}"
            )
        if self.pretrained and getattr(made, "quantization_config", None):
            raise WorkloadError(f"{WHERE}={self.name_or_path}: its weights are quantized: use the full weights")
        made.use_cache = False
        return made

    def state_dict(self) -> dict[str, Any]:
        """Return the model's configuration, which a restart compares, and exports contain."""
        return {CONFIG_STATE: json.dumps(self._description, sort_keys=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to go on with another configuration than the run began with."""
        saved = json.loads(state.get(CONFIG_STATE, "{}"))
        differing = [
            key
            for key in sorted(saved.keys() | self._description.keys() if saved else ())
            if saved.get(key) != self._description.get(key) and key not in _NO_PART_OF_THE_MODEL
        ]
        if differing:
            key = differing[0]
            changes = f"{key} is {self._description.get(key)!r} and was {saved.get(key)!r}"
            raise WorkloadError(f"config.json of {self.name_or_path} has changed: {changes}: put the file back")

    @property
    def base_settings(self) -> dict[str, Any]:
        """Settings that decide the frozen model besides its files."""
        return {**self.settings, "base": self.base}

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.lora is None or self.base in QUANTIZERS else getattr(torch, self.base)

    def _freeze(self, model: nn.Module, lora: Mapping[str, Any]) -> None:
        """Add adapters, and quantize the layers that they are in."""
        head = new_head(model, self._find_sources(model, Weights.find(self.name_or_path)))
        add_adapters(model, lora, head)
        if self.base in QUANTIZERS and not quantize_layers(find_layers(model), self.base):
            raise WorkloadError(f"workload.args.base={self.base}: {type(model).__name__} has no layers of nn.Linear")

    def parallelize(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Apply the model's own tensor-parallel plan, then FSDP to its layers, and read frozen weights."""
        for name in ("cp", "pp", "ep"):
            if layout.sizes.get(name, 1) > 1:
                key = "pipeline.stages" if name == "pp" else name
                raise WorkloadError(f"parallel.{key}: must be 1 for workload hf; the built-in model supports it")
        if layout.sizes["tp"] > 1:
            split_by_plan(model, layout.tp)
        if not self.pretrained:
            model.to(layout.device)
        else:
            self._match_weights(model, layout)
        try:
            policy = mixed_precision(self.config)
            whole = keep_whole(model, layout, policy.param_dtype or torch.float32)
            apply_data_parallel(find_layers(model), model, layout, self.config, policy, whole)
        except CannotShard as error:
            raise WorkloadError(str(error)) from error
        if self.pretrained:
            check_rows(model)
            device = torch.device("cpu") if offloads_all(self.config) else layout.device
            model._apply(lambda tensor: empty_like(tensor, device) if tensor.is_meta else tensor.to(device))
            _tie(model)
        if isinstance(self._weights, Weights) and self.lora is not None:
            load_pretrained(model, self._weights, self._sources)
        return model

    def _match_weights(self, model: nn.Module, layout: Layout) -> None:
        """Find the pretrained tensors of a whole model. A restart needs only those that are frozen."""
        try:
            self._weights = Weights.find(self.name_or_path)
        except WorkloadError as error:
            if self.lora is not None:
                raise
            self._weights = error
            return
        self._sources = self._find_sources(model, self._weights)
        if self.lora is not None:
            names = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
            digest = self._weights.digest(self.name_or_path, self.base_settings, layout)
            mark_frozen_base(model, FrozenBase(names=names, place=self.name_or_path, digest=digest))

    def set_initial_weights(self, model: nn.Module) -> None:
        """Read the pretrained weights, and fill adapters and a new head; a restored checkpoint has them instead."""
        if not self.pretrained:
            return
        if isinstance(self._weights, WorkloadError):
            raise self._weights
        if self.lora is None:
            load_pretrained(model, self._weights, self._sources)
        fill_adapters(model, self.config.train.seed)
        fill_head(model, new_head(model, self._sources), self.config.train.seed)

    def build_data(self, layout: Layout) -> Data | StatefulData:
        data = super().build_data(layout)
        found, known = TokenIndex.read(Path(self.config.data.path)).vocab_size, self._description.get("vocab_size")
        if isinstance(known, int) and found > self.settings.get("vocab_size", known):
            raise WorkloadError(
                f"{self.config.data.path} has {found} distinct tokens, but the model's vocab_size is {known}"
            )
        return data

    def _find_sources(self, model: nn.Module, weights: Weights) -> dict[str, str]:
        """Return the name in the files of each tensor, and say what is in only one of model and files."""
        sources = find_sources(model, weights)
        head, unused = new_head(model, sources), sorted(weights.files.keys() - set(sources.values()))
        if head and self.task.endswith("-lm"):
            why = f"its files have no {head[0]}, so the language model would have a new head"
            raise WorkloadError(f"{WHERE}={self.name_or_path}: {why}: type workload.args.pretrained=false to train one")
        for names, what in ((head, "new, with initial values"), (unused, "in its files, but not in the model")):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                sys.stderr.write(f"{self.name_or_path}: {', '.join(names[:3])}{more}: {what}\n")
        return sources

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the model's own loss of a mapping, or the cross-entropy of tokens 1.. given tokens 0.. in float32."""
        if isinstance(batch, Mapping):
            loss: torch.Tensor = model(**batch).loss
            return loss
        if isinstance(batch, MaskedTokens):
            found = model(input_ids=batch.inputs).logits
            return summed_cross_entropy(found.flatten(0, 1), batch.targets.flatten()) / batch.trained
        targets = batch[:, 1:]
        logits = model(input_ids=batch[:, :-1]).logits
        mean: torch.Tensor = summed_cross_entropy(logits.flatten(0, 1), targets.flatten()) / targets.numel()
        return mean


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


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
    return units_of_known_classes(model, getattr(model, "_no_split_modules", None) or ()) or fsdp_units(model)


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
    _check_coverage(model, plan, mesh.size())
    tied = bool(getattr(model.config, "tie_word_embeddings", False))  # the output has the embedding's parameter
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.named_parameters(recurse=False)):
            continue
        style = _find_style(name, plan)
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


def _find_style(name: str, plan: Mapping[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _check_coverage(model: nn.Module, plan: Mapping[str, str], ranks: int) -> None:
    """Refuse parameters beside split modules that the plan leaves out: they may get a part of the activations."""
    split = {name.rpartition(".")[0] for name, _ in model.named_modules() if _find_style(name, plan)} - {""}
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        if not _find_style(module, plan) and any(module.startswith(f"{owner}.") for owner in split):
            why = f"the tensor-parallel plan of {type(model).__name__} leaves {module} out"
            raise WorkloadError(f"parallel.tp={ranks}: {why}: type parallel.tp=1")


def _check_sizes(model: nn.Module, ranks: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = getattr(model.config, key, None)
        if isinstance(size, int) and size % ranks:
            raise WorkloadError(f"the model's {key}={size}: must be a multiple of parallel.tp={ranks}")
