"""LoRA (Hu et al. 2021) for `workload: hf`: trained adapters of peft beside a frozen base model."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trainer.models.llama import fill
from trainer.models.pretrained_weights import is_adapter, library
from trainer.worker.workload import WorkloadError

SETTINGS = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "use_rslora",
)  # fmt: skip
"""Settings of `peft.LoraConfig` in `workload.args.lora`; the others would change the base model."""
ADAPTER = "default"
_WHERE = "workload.args.lora"


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise WorkloadError for a setting that is unknown, or would train or change the base model."""
    if not isinstance(settings, Mapping):
        raise WorkloadError(f"{_WHERE}={settings}: must be a mapping, such as {{r: 16}}")
    for name in settings:
        if name not in SETTINGS:
            raise WorkloadError(f"{_WHERE}.{name}: must be one of {', '.join(SETTINGS)}")
    if not isinstance(rank := settings.get("r", 8), int) or rank < 1:
        raise WorkloadError(f"{_WHERE}.r={rank}: must be a whole number above 0")


def add_adapters(model: nn.Module, settings: Mapping[str, Any], head: Collection[str] = ()) -> None:
    """Add adapters in float32 and freeze everything except the parameters of a new head, which gets none.

    Raises WorkloadError if no module matches.
    """
    peft, excluded = library("peft"), settings.get("exclude_modules") or []
    if head and not isinstance(excluded, str):
        settings = {**settings, "exclude_modules": [*excluded, *{name.rpartition(".")[0] for name in head}]}
    try:
        config = peft.LoraConfig(**settings)
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except (ValueError, TypeError, AttributeError, re.error) as error:
        raise WorkloadError(f"{_WHERE}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    shared = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".base_layer." in name and shared[id(parameter)] > 1:
            raise WorkloadError(
                f"{_WHERE}.target_modules: {name.partition('.base_layer.')[0]} has tied weights: leave it out"
            )
    for name in head:
        model.get_parameter(name).requires_grad_(True)
    for name, parameter in list(model.named_parameters()):
        if is_adapter(name):
            owner, _, last = name.rpartition(".")
            wide = torch.empty_like(parameter, dtype=torch.float32, device="meta")
            model.get_submodule(owner).register_parameter(last, nn.Parameter(wide))


@torch.no_grad()
def fill_adapters(model: nn.Module, seed: int) -> None:
    """Set initial values: one matrix of each pair is zero, so that the model begins as its base."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        if ".lora_A." in name:
            fill(name, parameter, seed, 1 / math.sqrt(3 * parameter[0].numel()))  # the variance of peft's
        elif ".lora_embedding_B." in name:
            fill(name, parameter, seed, 1.0)
        else:
            fill(name, parameter, seed, 0.0)


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules with an adapter, and their names."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight"):
            yield name, module
