"""Import of foreign weights as a run's first checkpoint: names, shapes and dtypes are checked one by one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from checkpointing.engine.interchange.importer import (
    ExternalTensors,
    ImportedTensor,
    TorchTensors,
    flat,
    load_torch,
    open_safetensors,
    tensor_info,
)
from checkpointing.engine.restore.source import NO_OPTIMIZER_STATE
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import TensorInfo
from checkpointing.storage.durable import read_json
from trainer.models import hugging_face
from trainer.models.expert_stacks import StackedExperts
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ModelConfig
from trainer.worker import workload
from trainer.worker.saved_state.checkpoint_contents import buffers_name, model_tensors, shared_tensors

PROVENANCE = "orch.json"
"""File with the provenance of an export."""

PROVENANCE_SCHEMA = "orch.export/1"
TORCH_FILE = "checkpoint.pt"

_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_VOCABULARY = ("model.embed_tokens.", "lm_head.", "embedding.", "output.")
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True, kw_only=True)
class ImportSource:
    """Data to import: model and optimizer tensors under their original names, and plain values."""

    place: Path
    model: ExternalTensors
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """Optimizer tensors that do not belong to a parameter, by their keys."""
    step: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    """Hugging Face's `config.json`."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints recorded at export, keyed by name."""


@dataclass(kw_only=True)
class ImportPlan:
    """The new checkpoint's tensors, and complaints, each with an override that fixes it (or an empty string)."""

    tensors: dict[str, ImportedTensor] = field(default_factory=dict)
    complaints: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    optimizer: bool = False


def open_source(place: Path) -> ImportSource:
    """Open a Hugging Face folder, an orch export, a safetensors file or a torch file.

    Raises CheckpointRefused or OSError.
    """
    folder = place if place.is_dir() else place.parent
    fingerprints = _fingerprints(folder)
    if place.is_dir() and (place / TORCH_FILE).exists() and not list(place.glob("*.safetensors")):
        place = place / TORCH_FILE
    if place.is_dir() or place.suffix == ".safetensors":
        given = open_safetensors(place)
        if not given.tensors:
            raise CheckpointRefused(str(place), "contains no *.safetensors file and no checkpoint.pt")
        config = folder / "config.json"
        return ImportSource(
            place=place, model=given, fingerprints=fingerprints, config=_object(config) if config.exists() else None
        )
    return _torch_source(place, fingerprints)


def _object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except ValueError as error:
        raise CheckpointRefused(path.name, str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointRefused(path.name, "is not a JSON object")
    return value


def _fingerprints(folder: Path) -> dict[str, str]:
    path = folder / PROVENANCE
    if not path.exists():
        return {}
    value = _object(path)
    if value.get("schema") != PROVENANCE_SCHEMA:
        raise CheckpointRefused(PROVENANCE, f"has schema {value.get('schema')}, not {PROVENANCE_SCHEMA}")
    try:
        return {str(name): str(entry["fingerprint"]) for name, entry in value["tensors"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointRefused(PROVENANCE, f"is malformed: {error}") from error


def _torch_source(place: Path, fingerprints: Mapping[str, str]) -> ImportSource:
    value = load_torch(place)
    if not isinstance(value, Mapping):
        raise CheckpointRefused(place.name, f"holds a {type(value).__name__}, not named tensors")
    model = next((value[key] for key in _MODEL_KEYS if isinstance(value.get(key), Mapping)), value)
    given = _strip_wrapper_prefixes(flat(model))
    optimizer = flat(value.get("optimizer", {}).get("state", {})) if isinstance(value.get("optimizer"), Mapping) else {}
    if model is value:  # DCP's converter writes such files from orch's checkpoints
        optimizer = {key.removeprefix("optimizer/"): t for key, t in given.items() if key.startswith("optimizer/")}
        inside = {key.removeprefix("model/"): t for key, t in given.items() if key.startswith("model/")}
        given = inside or given
    if not given:
        raise CheckpointRefused(place.name, "contains no model tensors (under `model`, `state_dict`, or at the top)")
    step, facts = value.get("step", 0), value.get("extra", {})
    with_optimizer = isinstance(value.get("optimizer"), Mapping)
    if isinstance(facts, Mapping) and not with_optimizer:  # counters without their tensors
        facts = {key: fact for key, fact in facts.items() if key != "rank_state"}
    own = value.get("orch") is not None or bool(fingerprints)
    return ImportSource(
        place=place, model=TorchTensors(given), fingerprints=fingerprints,
        # State saved by other programs is numbered, not named, so it cannot be identified.
        optimizer=optimizer if own or model is value else {},
        more=flat(value["optimizer"].get("more", {})) if own and with_optimizer else {},
        step=step if isinstance(step, int) and own else 0,
        facts=facts if isinstance(facts, Mapping) and own else {},
    )  # fmt: skip


def _strip_wrapper_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the name prefixes of DDP and torch.compile."""
    for prefix in _WRAPPERS:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def plan_import(source: ImportSource, config: JobConfig, *, weights_only: bool) -> ImportPlan:
    """Match the source with the model of the workload in `config`. Raises WorkloadError if it cannot be built."""
    found = ImportPlan()
    model = _built_model(config)
    shared = shared_tensors(model)
    keys = {key.removeprefix("model/"): key for key in model_tensors(model)}
    wanted = {name: tensor_info(tensor) for name, tensor in ((n, model_tensors(model)[k]) for n, k in keys.items())}
    keys = {name: key if key in shared else f"{buffers_name(0)}{name}" for name, key in keys.items()}
    built_in = config.trains_built_in_workload
    if built_in and config.model.experts.count and not source.model.tensors.keys() & wanted.keys():
        source = replace(source, model=StackedExperts(source.model))
    theirs = _their_names(source, wanted, config.model if built_in else None)
    if built_in and source.config is not None:
        found.complaints += hugging_face.mismatches(source.config, config.model)
    for name, info in wanted.items():
        _match_tensor(found, source, theirs.get(name, name), keys[name], info, config.model if built_in else None)
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - wanted.keys()
    if built_in and config.model.tie_embeddings and _differ(source.model, *hugging_face.TIED):
        told = " and ".join(hugging_face.TIED)
        found.complaints.append((f"{told} differ, but tied weights are one", "model.tie_embeddings=false"))
    left = source.model.tensors.keys() - {theirs.get(name, name) for name in wanted} - aliases
    left = {name for name in left if not (built_in and hugging_face.is_unneeded(name, config.model))}
    found.complaints += [(f"{name} is given, but the model has no such tensor", "") for name in sorted(left)]
    _add_optimizer(found, source, wanted, weights_only)
    _check_position(found, source, config)
    return found


def _differ(model: ExternalTensors, one: str, other: str) -> bool:
    """Return whether both tensors are given, with different values."""
    if not {one, other} <= model.tensors.keys():
        return False
    pairs = zip(model.blocks(one), model.blocks(other), strict=False)
    return model.tensors[one] != model.tensors[other] or any(
        not torch.equal(mine, their) for (mine, _), (their, _) in pairs
    )


def _built_model(config: JobConfig) -> nn.Module:
    """Build the workload's model on the meta device if possible, else with values."""
    target = config.workload.target
    with workload.users_code(f"importing {target}"):
        workload.find(config.workload)
    with workload.users_code(f"making {target}"):
        # A workload may create tensors and read them, so only its model is built on the meta device.
        made = workload.build(config)
    with workload.users_code(f"build_model() of {target}"):
        try:
            with torch.device("meta"):
                return made.build_model()
        except (RuntimeError, NotImplementedError):  # build_model() reads tensor values
            return made.build_model()


def _their_names(source: ImportSource, wanted: Mapping[str, TensorInfo], config: ModelConfig | None) -> dict[str, str]:
    """Map orch's names to the source's names if these are Hugging Face's; return {} if they are orch's already."""
    given = source.model.tensors.keys()
    if config is None or len(given & wanted.keys()) > len(given & set(hugging_face.names(config).values())):
        return {}
    return hugging_face.names(config)


def _match_tensor(
    found: ImportPlan, source: ImportSource, theirs: str, key: str, info: TensorInfo, config: ModelConfig | None
) -> None:
    given = source.model.tensors.get(theirs)
    if given is None:
        found.complaints.append((f"{theirs} is missing; the model needs it as {_describe(info)}", ""))
        return
    floats = [getattr(torch, each.dtype).is_floating_point for each in (given, info)]
    if floats[0] != floats[1]:
        found.complaints.append((f"{theirs} is {given.dtype}, the model's is {info.dtype}", ""))
        return
    if given.shape != info.shape:
        lacking = _padding(theirs, given, info, config)
        if not lacking:
            found.complaints.append((f"{theirs} is {_describe(given)}, the model's is {_describe(info)}", ""))
            return
        found.notes.append(f"{theirs}: {lacking} rows of padding are zeros (the vocabulary is rounded up)")
    if given.dtype != info.dtype and getattr(torch, given.dtype).itemsize > getattr(torch, info.dtype).itemsize:
        found.notes.append(f"{theirs}: {given.dtype} is rounded to {info.dtype}")
    fingerprint = source.fingerprints.get(theirs)
    found.tensors[key] = ImportedTensor(external=source.model, name=theirs, info=info, expected_fingerprint=fingerprint)


def _padding(name: str, given: TensorInfo, info: TensorInfo, config: ModelConfig | None) -> int:
    if config is None or given.shape[1:] != info.shape[1:] or not name.startswith(_VOCABULARY):
        return 0
    return info.shape[0] - given.shape[0] if config.vocab_size <= given.shape[0] < info.shape[0] else 0


def _describe(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _add_optimizer(
    found: ImportPlan, source: ImportSource, wanted: Mapping[str, TensorInfo], weights_only: bool
) -> None:
    state = TorchTensors({} if weights_only else source.optimizer)
    for name, info in state.tensors.items():
        parameter = name.rpartition("/")[0]
        if parameter not in wanted:
            found.complaints.append((f"the optimizer has {name}, but the model has no {parameter}", "--weights-only"))
        elif info.shape not in ((), wanted[parameter].shape) and not _rank_state(source):
            found.complaints.append((f"the optimizer's {name} is {_describe(info)}", "--weights-only"))
        else:
            fingerprint = source.fingerprints.get(f"optimizer/{name}")
            found.tensors[f"optimizer/{name}"] = ImportedTensor(
                external=state, name=name, info=info, expected_fingerprint=fingerprint
            )
    found.optimizer = bool(state.tensors) or (not weights_only and bool(_rank_state(source)))
    more = TorchTensors(source.more if found.optimizer else {})
    for key, info in more.tensors.items():
        found.tensors[key] = ImportedTensor(
            external=more, name=key, info=info, expected_fingerprint=source.fingerprints.get(key)
        )
    if not state.tensors:
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        found.tensors[NO_OPTIMIZER_STATE] = ImportedTensor(
            external=TorchTensors({"none": nothing}), name="none", info=tensor_info(nothing)
        )


def _check_position(found: ImportPlan, source: ImportSource, config: JobConfig) -> None:
    """Check the seed: a data position is valid only in the order of its own seed."""
    seed = source.facts.get("seed")
    if found.optimizer and seed not in (None, config.train.seed):
        what = f"its data position was counted with train.seed={seed} (--weights-only discards it)"
        found.complaints.append((what, f"train.seed={seed}"))


def facts(source: ImportSource, found: ImportPlan) -> tuple[int, dict[str, Any]]:
    """Return the step at which training continues, and the plain values of the checkpoint."""
    made = {"imported": {"source": str(source.place), "optimizer": found.optimizer}}
    begin = {"step": 0, "consumed": 0, "loss": float("nan"), "seed": None, "fingerprint": None}
    # Without its data position, a state can only start from step 0.
    if not found.optimizer or not isinstance(source.facts.get("consumed"), int):
        return 0, {**begin, **made}
    kept = {key: source.facts[key] for key in begin if source.facts.get(key) is not None}
    rank_state = _rank_state(source)
    counts = {"rank_state": rank_state} if rank_state else {}
    return source.step, {**begin, **kept, **counts, "step": source.step, **made}


def _rank_state(source: ImportSource) -> list[dict[str, Any]]:
    """Return the optimizer's part of each rank's state, such as parameter groups' counters."""
    states = source.facts.get("rank_state", [])
    return [{"optimizer": each["optimizer"]} for each in states] if all("optimizer" in each for each in states) else []


def overrides(complaints: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the overrides that fix the complaints, without duplicates."""
    yield from dict.fromkeys(fix for _, fix in complaints if fix)
