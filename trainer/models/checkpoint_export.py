"""Export of a checkpoint's model: tensors, names and provenance."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.engine.audit.sealed_checkpoint import SealedCheckpoint
from checkpointing.engine.interchange.exporter import (
    LARGEST_FILE,
    SINGLE_FILE,
    Exported,
    ExportedTensor,
    new_folder,
    open_for_export,
    write_bytes,
    write_json,
    write_safetensors,
    write_torch,
)
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import TensorInfo
from checkpointing.storage.backends import Storage
from checkpointing.storage.digests import digest
from trainer.models import hugging_face
from trainer.models.expert_stacks import SplitExperts, any_moves, expert_name
from trainer.models.hf_workload import CONFIG_STATE
from trainer.models.lora_export import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MergedModel,
    adapter_config,
    adapter_name,
    has_adapters,
)
from trainer.models.pretrained_weights import is_adapter
from trainer.models.weights_import import PROVENANCE, PROVENANCE_SCHEMA, TORCH_FILE, ImportSource
from trainer.protocol.config import JobConfig
from trainer.worker.saved_state.checkpoint_contents import SHARED_NAMES, buffers_name, trained_keys
from trainer.worker.saved_state.object_state import decode
from trainer.worker.saved_state.optimizer_state import PREFIXES

MODEL, _BUFFERS = "model/", buffers_name(0)
_BESIDE_WEIGHTS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*",
    "generation_config.json", "*processor_config.json",
)  # fmt: skip
"""Files that transformers reads beside weights and configuration."""


def model_keys(source: SealedCheckpoint) -> dict[str, str]:
    """Map the model's own names to keys; buffers that differ between ranks come from rank 0.

    Raises CheckpointRefused.
    """
    found = {}
    for prefix in (MODEL, _BUFFERS):
        keys = sorted(key for key in source.index.tensors if key.startswith(prefix))
        found.update({key.removeprefix(prefix): key for key in keys})
    if not found:
        raise CheckpointRefused(source.manifest.name, f"has no model tensors (keys that begin with {MODEL})")
    return found


def further_names(source: SealedCheckpoint, known: Mapping[str, str]) -> dict[str, str]:
    """Map additional names of shared tensors (tied embeddings) to keys, if the checkpoint recorded them."""
    noted = source.manifest.extra.get(SHARED_NAMES)
    names = noted if isinstance(noted, dict) else {}
    return {str(name): known[first] for name, first in names.items() if name not in known and first in known}


class CheckpointTensors:
    """The model's tensors under its own names; every byte is verified as it is read."""

    def __init__(self, source: SealedCheckpoint, keys: Mapping[str, str]) -> None:
        self._source, self._keys = source, dict(keys)
        self.tensors: dict[str, TensorInfo] = {name: source.index.tensors[key] for name, key in keys.items()}

    def blocks(self, name: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        return self._source.blocks(self._keys[name])


def weights_source(source: SealedCheckpoint, place: Path) -> ImportSource:
    """Return a source with only the weights, without optimizer state, step or data position."""
    keys = model_keys(source)
    fingerprints = {name: source.fingerprints[key] for name, key in keys.items() if key in source.fingerprints}
    return ImportSource(place=place, model=CheckpointTensors(source, keys), fingerprints=fingerprints)


_OPTIMIZER = "optimizer/"
_OTHER_PREFIXES = tuple(prefix for prefix in PREFIXES if prefix != _OPTIMIZER)


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Settings for an export."""

    to: str
    """`safetensors`, `torch`, or `peft` for adapters alone."""
    folder: Path
    dtype: str | None = None
    """Target dtype of floating-point tensors; None leaves them unchanged."""
    with_optimizer: bool = False
    largest: int = LARGEST_FILE
    """Maximum bytes of values in one safetensors file."""
    run: str | None = None
    config: JobConfig | None = None
    """The run's configuration; without it, only names are available."""

    @property
    def has_built_in_model(self) -> bool:
        return self.config is not None and self.config.trains_built_in_workload


def export(
    storage: Storage, name: str, request: ExportRequest, progress: Callable[[int, int], None] | None = None
) -> tuple[Exported, dict[str, Any]]:
    """Write `request.folder` atomically, and return the exported files and their provenance.

    Raises CheckpointRefused if a byte differs from the original, FileExistsError if the folder is not empty, and
    OSError.
    """
    with open_for_export(storage, name) as source, new_folder(request.folder) as draft:
        if request.to == "torch":
            wanted = _torch_names(source, request)
            nest = _make_nest(source, request)
            done = write_torch(source, wanted, draft, name=TORCH_FILE, nest=nest, progress=progress)
        else:
            merged = MergedModel(source, request.config) if is_merge(source, request) and request.config else None
            wanted = _merged_names(merged, request) if merged else _safetensors_names(source, request)
            given = merged or SplitExperts(source)
            done = write_safetensors(given, wanted, draft, largest=request.largest, progress=progress)
            if request.to == "peft" and request.config is not None:
                os.rename(draft / SINGLE_FILE, draft / ADAPTER_FILE)
                write_json(draft / ADAPTER_CONFIG, adapter_config(request.config))
            elif request.has_built_in_model:
                assert request.config is not None
                kind = str(wanted[0].dtype).removeprefix("torch.")
                seq_len = request.config.train.seq_len
                described = hugging_face.config_json(request.config.model, seq_len=seq_len, dtype=kind)
                write_json(draft / "config.json", described)
            elif request.config is not None and (theirs := _own_description(source, request)):
                write_json(draft / "config.json", theirs)
                _copy_tokenizer(Path(str(request.config.workload.args["name_or_path"])).expanduser(), draft)
        provenance = _provenance(source, request, wanted, done)
        write_json(draft / PROVENANCE, provenance)
    return done, provenance


def _copy_tokenizer(model: Path, folder: Path) -> None:
    """Copy the tokenizer and the settings for generation of a model's folder, if it has them."""
    for pattern in _BESIDE_WEIGHTS:
        for path in sorted(model.glob(pattern)):
            if path.is_file():
                write_bytes(folder / path.name, path.read_bytes())


def _own_description(source: SealedCheckpoint, request: ExportRequest) -> dict[str, Any] | None:
    """Return `config.json` for a model of `workload: hf`, as the run began with it, or None for another model."""
    assert request.config is not None
    states = source.manifest.extra.get("rank_state") or [{}]
    state = states[0].get("workload")
    found = decode(state["value"], {}, {}) if state and "name_or_path" in request.config.workload.args else None
    saved = found.get(CONFIG_STATE) if isinstance(found, dict) else None
    if not isinstance(saved, str):
        return None
    settings = request.config.workload.args.get("settings") or {}
    return {**json.loads(saved), **settings, "dtype": request.dtype or "float32"}


def is_merge(source: SealedCheckpoint, request: ExportRequest) -> bool:
    """Return whether adapters are merged into their base model."""
    return request.to == "safetensors" and has_adapters(source, request.config)


def _merged_names(merged: MergedModel, request: ExportRequest) -> list[ExportedTensor]:
    kind = getattr(torch, request.dtype or "float32")
    return [
        ExportedTensor(key=name, name=name, dtype=kind if merged.dtype(name).is_floating_point else merged.dtype(name))
        for name in merged.names
    ]


def _dtype(source: SealedCheckpoint, key: str, request: ExportRequest) -> torch.dtype:
    found = source.dtype(key)
    return getattr(torch, request.dtype) if request.dtype and found.is_floating_point else found


def _safetensors_names(source: SealedCheckpoint, request: ExportRequest) -> list[ExportedTensor]:
    model = model_keys(source)
    if request.has_built_in_model:
        assert request.config is not None
        if hugging_face.find_architecture(request.config.model) is None:
            why = "has features that no model of transformers has together, such as model.experts.scores=sigmoid"
            raise CheckpointRefused(source.manifest.name, f"{why}: use --to torch")
        if any_moves(source, model):
            why = "has experts that were balanced by biases of the router, which Mixtral lacks: use --to torch"
            raise CheckpointRefused(source.manifest.name, why)
        theirs = hugging_face.names(request.config.model)
        if theirs.keys() != model.keys():
            odd = sorted(theirs.keys() ^ model.keys())[0]
            raise CheckpointRefused(
                source.manifest.name, f"does not contain the built-in model of its configuration: {odd}"
            )
        return list(_expert_by_expert(source, {theirs[name]: model[name] for name in theirs}, request))
    if request.to == "peft":
        if not has_adapters(source, request.config):
            raise CheckpointRefused(source.manifest.name, "has no LoRA adapters: use --to safetensors")
        if head := [name for name in model if not is_adapter(name) and model[name] in trained_keys(source.index)]:
            why = f"has {head[0]} beside its adapters, a new head, which the files of peft would lose"
            raise CheckpointRefused(source.manifest.name, f"{why}: use --to safetensors")
        return [
            ExportedTensor(key=key, name=adapter_name(name), dtype=_dtype(source, key, request))
            for name, key in model.items()
            if is_adapter(name)
        ]
    model |= further_names(source, model)  # strict loading requires every name
    return [ExportedTensor(key=key, name=name, dtype=_dtype(source, key, request)) for name, key in model.items()]


def _expert_by_expert(
    source: SealedCheckpoint, model: Mapping[str, str], request: ExportRequest
) -> Iterator[ExportedTensor]:
    """Yield the tensors, keyed by their names in files; stacks of experts become single matrices."""
    for name, key in model.items():
        if key.endswith("router.moves"):
            continue
        if name.rpartition(".")[0].endswith(".experts"):
            for expert in range(source.shape(key)[0]):
                yield ExportedTensor(
                    key=f"{key}#{expert}", name=expert_name(name, expert), dtype=_dtype(source, key, request)
                )
        else:
            yield ExportedTensor(key=key, name=name, dtype=_dtype(source, key, request))


def _torch_names(source: SealedCheckpoint, request: ExportRequest) -> list[ExportedTensor]:
    model = model_keys(source)
    wanted = [
        ExportedTensor(key=key, name=f"{MODEL}{name}", dtype=_dtype(source, key, request))
        for name, key in model.items()
    ]
    if request.with_optimizer:
        keys = sorted(key for key in source.index.tensors if key.startswith(PREFIXES))
        # The moments keep their precision: a rounded second moment changes the optimizer.
        wanted += [ExportedTensor(key=key, name=key, dtype=source.dtype(key)) for key in keys]
    return wanted


def _make_nest(source: SealedCheckpoint, request: ExportRequest) -> Callable[[Mapping[str, Tensor]], dict[str, Any]]:
    def nest(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        model = {name.removeprefix(MODEL): t for name, t in tensors.items() if name.startswith(MODEL)}
        keys = model_keys(source)
        names = {key: name for name, key in keys.items()}
        # Strict loading requires every name of a shared tensor.
        model |= {name: model[names[key]] for name, key in further_names(source, keys).items()}
        if request.has_built_in_model and "output.weight" not in model and "embedding.weight" in model:
            model["output.weight"] = model["embedding.weight"]  # imported checkpoints record no further names
        state: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(_OPTIMIZER):
                parameter, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
                state.setdefault(parameter, {})[key] = tensor
        manifest = source.manifest
        made = {"run": request.run, "checkpoint": manifest.name, "schema": PROVENANCE_SCHEMA}
        # Optimizer tensors that belong to no parameter; plain values are in `extra`.
        more = {name: tensor for name, tensor in tensors.items() if name.startswith(_OTHER_PREFIXES)}
        optimizer = (
            {"optimizer": {"state": state, **({"more": more} if more else {})}} if request.with_optimizer else {}
        )
        return {"model": model, **optimizer, "step": manifest.step, "extra": manifest.extra, "orch": made}

    return nest


def _provenance(
    source: SealedCheckpoint, request: ExportRequest, wanted: list[ExportedTensor], done: Exported
) -> dict[str, Any]:
    """Return the provenance, which can later prove, without the checkpoint, that nothing was lost."""
    manifest = source.manifest
    own = MODEL if request.to == "torch" else ""
    return {
        "schema": PROVENANCE_SCHEMA,
        "run": request.run,
        "checkpoint": manifest.name,
        "step": manifest.step,
        "config_digest": manifest.extra.get("config_digest"),
        "manifest": digest(manifest.encode()),
        "torch": torch.__version__,
        "tensors": {
            w.name.removeprefix(own): {
                "key": w.key,
                "dtype": str(w.dtype).removeprefix("torch."),
                "fingerprint": done.fingerprints[w.name],
                "converted": w.key in source.index.tensors and w.dtype != source.dtype(w.key.partition("#")[0]),
            }
            for w in wanted
        },
    }
