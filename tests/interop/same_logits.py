"""Run by a test beside `transformers`, which orch does not need: `LIBRARIES FOLDER` prints what it found as JSON.

LIBRARIES has `transformers` and what it needs, NumPy too, which no process has whose fork this is. FOLDER/cases/NAME/hf
is an export of ours, NAME/ours.pt our tokens, logits and tensors under Hugging Face's names. Made here:
FOLDER/foreign/KIND/hf, models that `transformers` saved in several files, and their tokens and logits.
"""

import json
import os
import sys
from pathlib import Path

import torch


def compared(case: Path) -> dict[str, float | int | bool]:
    """One export, loaded as any user would load it."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    ours = torch.load(case / "ours.pt", weights_only=True)
    model, loading = AutoModelForCausalLM.from_pretrained(case / "hf", dtype=torch.float32, output_loading_info=True)
    with torch.no_grad():
        logits = model(ours["tokens"]).logits
    read = {}
    for path in sorted((case / "hf").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            read.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  # not a dict
    return {
        "difference": float((logits - ours["logits"]).abs().max()),
        "largest": float(ours["logits"].abs().max()),
        "troubles": sum(len(names) for names in loading.values()),
        "tensors": len(read),
        "same_bits": read.keys() == ours["state"].keys() and all(torch.equal(read[k], ours["state"][k]) for k in read),
    }


SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "initializer_range": 0.3,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 5e4}
LLAMA3 = {
    **PLAIN, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FOREIGN = {
    "llama": {"rope_parameters": LLAMA3},
    "mistral": {"rope_parameters": PLAIN, "sliding_window": 11, "head_dim": 16},
    "mixtral": {"rope_parameters": PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"rope_parameters": PLAIN, "tie_word_embeddings": True},
    "qwen3": {"rope_parameters": PLAIN, "head_dim": 16},
}
"""Small models, keyed by `model_type`."""


def make_foreign(folder: Path, kind: str) -> None:
    """A small model of `transformers`' own, whose vocabulary is not a multiple of 64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **FOREIGN[kind]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()  # zeros at first
    model.save_pretrained(folder / "hf", max_shard_size="20KB")
    tokens = torch.randint(0, 100, (2, 64))
    with torch.no_grad():
        torch.save({"tokens": tokens, "logits": model(tokens).logits}, folder / "theirs.pt")


def main() -> None:
    libraries, folder = sys.argv[1], Path(sys.argv[2])
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, libraries)
    sys.modules.pop("numpy", None)
    for kind in FOREIGN:
        (folder / "foreign" / kind).mkdir(parents=True)
        make_foreign(folder / "foreign" / kind, kind)
    found = {case.name: compared(case) for case in sorted((folder / "cases").iterdir())}
    sys.stdout.write(json.dumps(found) + "\n")
