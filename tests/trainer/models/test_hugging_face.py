"""The built-in model and Hugging Face: equal logits, lossless round trips, reported mismatches."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # torch complains once, when it is imported, that NumPy is not there; orch does not use it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch

    from checkpointing.engine.interchange.exporter import LARGEST_FILE

from checkpointing.engine.audit.sealed_checkpoint import SealedCheckpoint
from checkpointing.engine.interchange.exporter import open_for_export
from checkpointing.engine.interchange.importer import write_checkpoint
from checkpointing.errors import CheckpointRefused
from checkpointing.format.commit import Name
from checkpointing.storage.backends import LocalStorage
from tests.checkpointing.engine.built_checkpoint import build, rows
from tests.warm_programs import WarmPrograms
from trainer.models import hugging_face, weights_import
from trainer.models.built_in import LlamaWorkload
from trainer.models.checkpoint_export import ExportRequest, export
from trainer.models.expert_stacks import expert_name
from trainer.models.llama import Llama
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.config_sections.recipe_config import (
    AttentionConfig,
    ExpertsConfig,
    ModelConfig,
    RopeScalingConfig,
    TrainConfig,
)
from trainer.worker.saved_state.checkpoint_contents import model_tensors

ROOT = Path(__file__).resolve().parents[3]
INTEROP = ROOT / ".venv" / "interop"

SMALL = ModelConfig(vocab_size=100, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, rope_theta=500.0)
LLAMA3 = RopeScalingConfig(kind="llama3", factor=4.0, original_length=16)
MODELS = {
    "grouped": SMALL,
    "tied": replace(SMALL, tie_embeddings=True),
    "as-many-kv-heads": replace(SMALL, kv_heads=4, norm_eps=1e-6),
    "llama-3.1": replace(SMALL, rope_scaling=LLAMA3),
    "linear": replace(SMALL, rope_scaling=RopeScalingConfig(kind="linear", factor=2.0)),
    "mistral": replace(SMALL, attention=AttentionConfig(window=9, head_dim=16)),
    "mixtral": replace(
        SMALL,
        experts=ExpertsConfig(count=4, per_token=2, ffn_dim=40, scores="softmax"),
        attention=AttentionConfig(window=20),
    ),
    "qwen2": replace(SMALL, attention=AttentionConfig(qkv_bias=True), tie_embeddings=True),
    "qwen3": replace(SMALL, attention=AttentionConfig(qk_norm=True, head_dim=16)),
}


def job(model: ModelConfig) -> JobConfig:
    return JobConfig(model=model, train=TrainConfig(seq_len=64, dtype="float32"))


def model_of(config: ModelConfig, seed: int = 1) -> Llama:
    model = LlamaWorkload(job(config)).build_model()
    model.materialize(torch.device("cpu"), seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3 + ("norm" in name))
    return model


def saved(model: Llama, root: Path, **more: torch.Tensor) -> Path:
    tensors = {key: tensor.detach() for key, tensor in {**model_tensors(model), **more}.items()}
    boxes = {key: rows(tensor.shape, 2) for key, tensor in tensors.items() if tensor.ndim == 2}
    return build(tensors, boxes).write(root)


def exported(model: Llama, place: Path, **order: Any) -> Path:
    folder = saved(model, place / "run")
    settings = {"to": "safetensors", "folder": place / "hf", "config": job(model.config), "run": "tiny-1", **order}
    export(LocalStorage(folder.parent), folder.name, ExportRequest(**settings))
    return place / "hf"


def brought_in(source: Path, config: ModelConfig, root: Path) -> SealedCheckpoint:
    given = weights_import.open_source(source)
    fit = weights_import.plan_import(given, job(config), weights_only=False)
    assert fit.complaints == []
    step, extra = weights_import.facts(given, fit)
    name = Name(step=step, attempt=0, nonce="cd")
    write_checkpoint(LocalStorage(root), name, fit.tensors, extra=extra, world={"ranks": 1})
    return open_for_export(LocalStorage(root), str(name))


def their_state(model: Llama) -> Iterator[tuple[str, torch.Tensor]]:
    for ours, theirs in hugging_face.names(model.config).items():
        if ".experts." in ours:
            for expert, matrix in enumerate(model.get_parameter(ours).detach()):
                yield expert_name(theirs, expert), (matrix.T if ours.endswith("w2") else matrix).contiguous()
        elif not ours.endswith(".moves"):
            yield theirs, model.get_parameter(ours).detach()


def whole(source: SealedCheckpoint, key: str) -> torch.Tensor:
    parts = [block for block, _ in source.blocks(key)]
    return torch.cat(parts) if source.shape(key) else parts[0]


@pytest.mark.multi
def test_transformers_gives_the_same_logits_both_ways(programs: WarmPrograms, tmp_path: Path) -> None:
    if not (INTEROP / ".ready").exists():
        pytest.skip("transformers is not installed apart: `make .venv/interop/.ready` does that, as `make test` does")
    tokens = torch.randint(0, 100, (2, 64), generator=torch.Generator().manual_seed(5))
    for name, config in MODELS.items():
        place, model = tmp_path / "cases" / name, model_of(config)
        place.mkdir(parents=True)
        exported(model, place, largest=20_000 if name == "grouped" else LARGEST_FILE)
        state = dict(their_state(model))
        with torch.no_grad():
            logits = model(tokens)
        torch.save({"tokens": tokens, "logits": logits, "state": state}, place / "ours.pt")
    (done,) = programs.run("tests.interop.same_logits", [(INTEROP, tmp_path)], 200.0)
    assert done.code == 0, done.err
    found = done.result()
    assert found.keys() == MODELS.keys()
    for name, case in found.items():
        # Float32 and other kernels: the last bits of the largest logit.
        assert case["difference"] <= 1e-5 * case["largest"], f"{name}: logits differ: {case}"
        assert case["largest"] > 1.0, f"{name}: logits too small to tell anything"
        assert case["troubles"] == 0, f"{name}: {case}"
        assert case["same_bits"], f"{name}: safetensors itself reads other values"
    assert len(list((tmp_path / "cases" / "grouped" / "hf").glob("model-*-of-*.safetensors"))) > 1
    for kind, config in FOREIGN.items():
        _foreign_comes_in(tmp_path / "foreign" / kind, config)


SMALLER = replace(SMALL, kv_heads=1, rope_theta=5e4, norm_eps=1e-6)
FOREIGN = {
    "llama": replace(
        SMALLER, rope_scaling=RopeScalingConfig(kind="llama3", factor=8.0, low_freq_factor=1.0, original_length=16)
    ),
    "mistral": replace(SMALLER, attention=AttentionConfig(window=11, head_dim=16)),
    "mixtral": replace(SMALLER, experts=ExpertsConfig(count=4, per_token=2, ffn_dim=48, scores="softmax")),
    "qwen2": replace(SMALLER, attention=AttentionConfig(qkv_bias=True), tie_embeddings=True),
    "qwen3": replace(SMALLER, attention=AttentionConfig(qk_norm=True, head_dim=16)),
}
"""The models of tests/interop/same_logits.py, as they are configured here."""


def _foreign_comes_in(folder: Path, config: ModelConfig) -> None:
    theirs = torch.load(folder / "theirs.pt", weights_only=True)
    model = model_of(config)
    with brought_in(folder / "hf", config, folder / "in") as source, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole(source, f"model/{name}").view(parameter.shape))
        logits = model(theirs["tokens"])
    difference = (logits[..., :100] - theirs["logits"]).abs().max()
    assert difference <= 1e-5 * theirs["logits"].abs().max(), config
    assert not logits[..., 100:].any(), "rows of padding are zeros"


@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("name", ["grouped", "tied", "mixtral", "qwen2", "qwen3"])
def test_what_was_exported_comes_back_bit_for_bit(tmp_path: Path, to: str, name: str) -> None:
    model = model_of(MODELS[name])
    folder = exported(model, tmp_path, to=to)
    (origin,) = (tmp_path / "run").iterdir()
    before = open_for_export(LocalStorage(tmp_path / "run"), origin.name)
    with before, brought_in(folder, MODELS[name], tmp_path / "in") as after:
        assert {key: after.fingerprints[key] for key in before.fingerprints} == before.fingerprints
        for key, tensor in model_tensors(model).items():
            assert torch.equal(whole(after, key), tensor)


def test_a_torch_export_loads_strictly_into_the_model_with_its_optimizer(tmp_path: Path) -> None:
    model, moment = model_of(MODELS["tied"]), torch.rand(32)
    folder = saved(model, tmp_path / "run", **{"optimizer/norm.weight/exp_avg": moment})
    order = ExportRequest(to="torch", folder=tmp_path / "pt", config=job(model.config), with_optimizer=True)
    export(LocalStorage(folder.parent), folder.name, order)
    read = torch.load(tmp_path / "pt" / "checkpoint.pt", weights_only=True)
    assert read["step"] == 5
    assert torch.equal(read["optimizer"]["state"]["norm.weight"]["exp_avg"], moment)
    other = model_of(MODELS["tied"], seed=2)
    other.load_state_dict(read["model"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_bfloat16_says_what_it_did(tmp_path: Path) -> None:
    model = model_of(SMALL)
    folder = exported(model, tmp_path, dtype="bfloat16")
    given = weights_import.open_source(folder)
    assert {info.dtype for info in given.model.tensors.values()} == {"bfloat16"}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert all(entry["converted"] for entry in json.loads((folder / "orch.json").read_text())["tensors"].values())
    with brought_in(folder, SMALL, tmp_path / "in") as source:
        assert torch.equal(whole(source, "model/norm.weight"), model.norm.weight.detach().bfloat16().float())


def test_an_export_that_was_changed_afterwards_is_refused(tmp_path: Path) -> None:
    folder = exported(model_of(SMALL), tmp_path)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointRefused, match="fingerprint"):
        brought_in(folder, SMALL, tmp_path / "in")


def complaints(source: Path, config: JobConfig, *, weights_only: bool = False) -> list[tuple[str, str]]:
    return weights_import.plan_import(weights_import.open_source(source), config, weights_only=weights_only).complaints


def test_mismatches_are_reported_one_by_one_with_the_override_that_fixes_them(tmp_path: Path) -> None:
    folder = exported(model_of(SMALL), tmp_path)
    told = complaints(folder, job(replace(SMALL, ffn_dim=64, layers=3, rope_theta=1e4)))
    assert [mend for _, mend in told if mend] == ["model.layers=2", "model.ffn_dim=48", "model.rope_theta=500.0"]
    words = "\n".join(what for what, _ in told)
    assert "model.layers.0.mlp.gate_proj.weight is float32 [48, 32], the model's is float32 [64, 32]" in words
    assert "model.layers.2.self_attn.q_proj.weight is missing; the model needs it as float32 [32, 32]" in words


MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "gemma"}, "model_type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0}}, "scaled"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0}}, "model.rope_scaling.kind=llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 1.0}}, "kind=linear"),
        ({"head_dim": 16}, "model.attention.head_dim=16"),
        ({"model_type": "qwen2"}, "model.attention.qkv_bias=true"),
        ({"model_type": "qwen3"}, "model.attention.qk_norm=true"),
        ({"model_type": "mistral", "sliding_window": 16}, "model.attention.window=16"),
        ({"tie_word_embeddings": True}, "model.tie_embeddings"),
        ({"vocab_size": 300}, "model.vocab_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "32"}, "its hidden_size is '32'; it must be a number"),
        ({"rope_parameters": "linear"}, "must be a mapping"),
        ({"rope_parameters": None, "rope_scaling": None, "rope_theta": None}, "model.rope_theta=10000.0"),
        ({"rms_norm_eps": None}, "model.norm_eps=1e-06"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": MIXED}, "only some"),
    ],
)
def test_what_our_model_cannot_be_is_told(change: dict[str, Any], told: str) -> None:
    described = hugging_face.config_json(SMALL, seq_len=64, dtype="float32")
    assert list(hugging_face.mismatches(described, SMALL)) == []
    given = {key: value for key, value in {**described, **change}.items() if value is not None}
    first, *others = hugging_face.mismatches(given, SMALL)
    assert told in " ".join(first)
    assert len(others) <= ("layer_types" in change), "one cause, one complaint"


def test_what_means_the_same_is_no_mismatch() -> None:
    described = hugging_face.config_json(SMALL, seq_len=64, dtype="float32")
    same = {"hidden_act": "swish", "layer_types": ["full_attention"] * 2, "sliding_window": None}
    assert list(hugging_face.mismatches({**described, **same}, SMALL)) == []
    windowed = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}
    told = [what for what, _ in hugging_face.mismatches({**described, **windowed}, SMALL)]
    assert not any("window" in what for what in told)


def test_copies_of_tied_weights_that_differ_are_told(tmp_path: Path) -> None:
    tied = replace(SMALL, tie_embeddings=True)
    state = model_of(tied).state_dict()
    theirs = {their: state[mine] for mine, their in hugging_face.names(tied).items()}
    values = state["embedding.weight"]
    for copy, told in ((values.clone(), []), (values + 1, ["model.tie_embeddings=false"])):
        torch.save({**theirs, "lm_head.weight": copy}, tmp_path / "a.pt")
        assert [mend for _, mend in complaints(tmp_path / "a.pt", job(tied))] == told


def test_state_dicts_of_others(tmp_path: Path) -> None:
    model = model_of(SMALL)
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(
        {"state_dict": state, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}, "epoch": 4}, tmp_path / "a.pt"
    )
    assert complaints(tmp_path / "a.pt", job(SMALL)) == []
    fit = weights_import.plan_import(weights_import.open_source(tmp_path / "a.pt"), job(SMALL), weights_only=False)
    assert not fit.optimizer, "state that is numbered cannot be told apart"
    torch.save({**model.state_dict(), "surplus": torch.zeros(2)}, tmp_path / "b.pt")
    assert complaints(tmp_path / "b.pt", job(SMALL)) == [("surplus is given, but the model has no such tensor", "")]
    torch.save({"epoch": 4}, tmp_path / "c.pt")
    with pytest.raises(CheckpointRefused, match="no model tensors"):
        weights_import.open_source(tmp_path / "c.pt")


def test_a_position_counted_with_another_seed_is_told(tmp_path: Path) -> None:
    model = model_of(SMALL)
    state = {"norm.weight": {"exp_avg": torch.zeros(32), "step": torch.tensor(5.0)}}
    value = {"model": model.state_dict(), "optimizer": {"state": state}, "step": 5, "extra": {"seed": 9}, "orch": {}}
    torch.save(value, tmp_path / "a.pt")
    ((what, mend),) = complaints(tmp_path / "a.pt", job(SMALL))
    assert (mend, "train.seed=9" in what) == ("train.seed=9", True)
    assert complaints(tmp_path / "a.pt", job(SMALL), weights_only=True) == []


def test_a_model_of_ones_own_is_exported_under_its_own_names(tmp_path: Path) -> None:
    tensors = {
        "model/net.weight": torch.rand(4, 3),
        "buffers/rank-00000/net.mean": torch.rand(4),
        "rng/rank-00000": torch.ones(3),
    }
    folder = build(tensors).write(tmp_path / "run")
    config = JobConfig(workload=WorkloadConfig(target="mine:Own"))
    done, _ = export(
        LocalStorage(folder.parent), folder.name, ExportRequest(to="safetensors", folder=tmp_path / "st", config=config)
    )
    assert sorted(done.files) == ["model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "st").iterdir()) == ["model.safetensors", "orch.json"]
    given = weights_import.open_source(tmp_path / "st").model
    assert given.tensors.keys() == {"net.weight", "net.mean"}
    ((block, _),) = given.blocks("net.weight")
    assert torch.equal(block, tensors["model/net.weight"])
