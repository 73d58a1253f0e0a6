"""`workload: hf` on two ranks computes what transformers and peft compute from the same files, or refuses."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.submitted_run import free_port

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

ROOT, HERE = Path(__file__).resolve().parents[3], Path(__file__).parent
PARTS = [ROOT / ".venv" / name for name in ("interop", "finetuning")]
CASES = [
    ("llama", 2, "fsdp", True), ("qwen2", 2, "fsdp", True), ("qwen3", 2, "ddp", True), ("mistral", 1, "fsdp", True),
    ("gpt2", 1, "fsdp", True), ("opt", 1, "ddp", False), ("gpt2", 2, "fsdp", True), ("mixtral", 1, "fsdp", True),
    ("mixtral", 1, "fsdp", False), ("vit", 1, "fsdp", True), ("t5", 1, "fsdp", True), ("t5", 1, "ddp", False),
    ("llama", 2, "fsdp", True, True), ("gpt2", 1, "fsdp", True, True), ("gpt_neox", 1, "fsdp", True),
    ("xlm-roberta", 1, "fsdp", True), ("bert", 1, "fsdp", True), ("mbart", 1, "fsdp", True), ("resnet", 1, "ddp", True),
    ("apertus", 2, "fsdp", True),
]  # fmt: skip
DAMAGES = {
    "cut": "is not a complete safetensors file",
    "absent": "lists model-00002",
    "no map": "has no weight_map",
    "no head": "its files have no lm_head.weight",
    "half": "its files have no model.norm.weight (1 such parameters)",
    "fp8": "its weights are quantized",
    "integers": "is quantized, which workload hf does not read",
    "copies": "type +workload.args.settings.tie_word_embeddings=false",
    "no config": "has no config.json",
    "bad value": "num_hidden_layers",
}
"""What is done to the files of a Llama, and what the refusal says."""
REFUSED = [("gpt2", 2), ("apertus", 2)]
BOUND = 1e-5
EXACT, ROUNDED = 1e-5, 3e-2
LORA_CASES = [
    ("fsdp", "float32", None, EXACT, 0.5), ("ddp", "float32", "int8", EXACT, 0.41),
    ("fsdp", "float32", "nf4", EXACT, 0.16), ("fsdp", "float32", "bfloat16", ROUNDED, 0.26),
    ("fsdp", "bfloat16", "int8", ROUNDED, 0.21), ("ddp", "bfloat16", "nf4", ROUNDED, 0.31),
    ("ddp", "bfloat16", "int8", ROUNDED, 0.41),
]  # fmt: skip
"""Strategy, `train.dtype`, `base`, the bound for gradients, and the most of the base's float32 bytes on a rank."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if not all((part / ".ready").is_file() for part in PARTS):
        pytest.skip("transformers and peft are not installed apart: `make test` does that")
    folder = tmp_path_factory.mktemp("models")
    environ = {
        **os.environ, "PYTHONPATH": ":".join(map(str, (ROOT, *PARTS))), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    made = subprocess.run(
        [sys.executable, str(HERE / "make_hf_models.py"), str(folder)], env=environ, capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr
    for damage in DAMAGES:
        shutil.copytree(folder / "llama", folder / damage)
        apply_damage(folder / damage, damage)
    cases = [*CASES, *(("lora", *case[:3]) for case in LORA_CASES), *((damage, 1, "fsdp", True) for damage in DAMAGES)]
    words = [sys.executable, str(HERE / "hf_ranks.py"), str(folder), json.dumps(cases)]
    ranks = [
        subprocess.Popen(words, env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][1].decode()[-3000:]
    return dict(json.loads(outputs[0][0].splitlines()[-1]))


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a safetensors file; the values stay where they are."""
    (size,), data = struct.unpack("<Q", path.read_bytes()[:8]), path.read_bytes()[8:]
    header = json.loads(data[:size])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[size:])


def apply_damage(folder: Path, damage: str) -> None:
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    if damage == "cut":
        path = folder / places["model.norm.weight"]
        path.write_bytes(path.read_bytes()[:-4])
    elif damage == "absent":
        sorted(folder.glob("*.safetensors"))[1].unlink()
    elif damage == "no map":
        index.write_text("{}")
    elif damage in ("no head", "half"):
        name = "lm_head.weight" if damage == "no head" else "model.norm.weight"
        change_json(index, weight_map={key: place for key, place in places.items() if key != name})
    elif damage == "fp8":
        change_json(folder / "config.json", quantization_config={"quant_method": "fp8"})
    elif damage == "integers":
        name = "model.norm.weight"
        change_header(folder / places[name], lambda header: header[name].update(dtype="I32"))
    elif damage == "copies":
        change_json(folder / "config.json", tie_word_embeddings=True)
    elif damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "bad value":
        change_json(folder / "config.json", num_hidden_layers="two")


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_would_give_another_model_are_refused(found: dict[str, dict[str, Any]], damage: str) -> None:
    assert DAMAGES[damage] in found[f"{damage} 1 fsdp True"].get("refused", found[f"{damage} 1 fsdp True"])


@pytest.mark.parametrize("case", [case for case in CASES if case[:2] not in REFUSED and case[0] != "mixtral"], ids=str)
def test_weights_and_gradients_are_those_of_transformers(
    found: dict[str, dict[str, Any]], case: tuple[Any, ...]
) -> None:
    kind, tp, strategy, *_ = case
    result = found[" ".join(map(str, case))]
    assert result["same weights"], case
    assert result["same buffers"], case
    assert result["gradients"] < BOUND, case
    if strategy == "fsdp":
        assert 0.45 < result["share"] < (0.55 if tp == 1 else 0.9), f"{kind}: each rank has about half of the weights"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("apertus 2 fsdp True", "the tensor-parallel plan of ApertusForCausalLM leaves model.layers.0.mlp.act_fn out"),
        ("gpt2 2 fsdp True", "parallel.tp=2: GPT2LMHeadModel has no tensor-parallel plan: type parallel.tp=1"),
        ("mixtral 1 fsdp True", "its files have no model.layers.0.mlp.experts.gate_up_proj (4 such parameters)"),
    ],
)
def test_what_would_be_wrong_is_refused(found: dict[str, dict[str, Any]], case: str, why: str) -> None:
    assert why in found[case]["refused"]


def test_experts_without_pretrained_weights_train_under_fsdp(found: dict[str, dict[str, Any]]) -> None:
    assert found["mixtral 1 fsdp False"]["gradients"] < BOUND


@pytest.mark.parametrize("case", LORA_CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_adapters_train_as_in_peft_and_are_all_that_is_saved(
    found: dict[str, dict[str, Any]], case: tuple[Any, ...]
) -> None:
    *key, bound, share = case
    results = {tuple(one[:3]): found[" ".join(map(str, ("lora", *one[:3])))] for one in LORA_CASES}
    result = results[tuple(key)]
    assert result["begins as base"]
    assert result["gradients"] < bound
    assert result["saved"] == [f"model/{name}" for name in result["adapters"]]
    assert result["share"] <= share
    bases = {base or dtype for _, dtype, base in results}
    assert len({one["digest"] for one in results.values()}) == len(bases), "a base in another precision is another one"
