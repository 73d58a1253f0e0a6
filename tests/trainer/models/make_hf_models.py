"""Small models of transformers with random weights: `make_hf_models.py FOLDER [VOCABULARY [KIND]]`."""

import os
import sys
from pathlib import Path

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
KINDS = {
    "llama": {**SIZES, "rope_parameters": ROPE},
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 16},
    "mistral": {**SIZES, "sliding_window": 11},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 4, "dropout": 0.0,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "vit": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 16, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0},
    "gpt_neox": {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "bert": {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "xlm-roberta": {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5, "layer_type": "basic"},
    "apertus": {**SIZES},
    "mbart": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
              "max_position_embeddings": 64},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
           "decoder_start_token_id": 0},
}  # fmt: skip
"""Configurations, keyed by `model_type`."""
LORA = {**SIZES, "hidden_size": 64, "intermediate_size": 128}
"""A Llama whose layers nf4 can hold."""
TASKS = {
    "vit": "image-classification", "resnet": "image-classification", "t5": "seq2seq-lm", "mbart": "seq2seq-lm",
    "bert": "masked-lm", "xlm-roberta": "masked-lm",
}  # fmt: skip
"""Tasks of models that are no causal language models."""


def main() -> None:
    import torch
    import transformers

    from trainer.models import hf_workload

    torch.manual_seed(3)
    vocabulary = {"vocab_size": int(sys.argv[2]) if len(sys.argv) > 2 else 128}
    wanted = sys.argv[3:] or [*KINDS, "lora"]
    for kind in wanted:
        model_type, settings = ("llama", LORA) if kind == "lora" else (kind, KINDS[kind])
        config = transformers.AutoConfig.for_model(
            model_type, **({} if kind in ("vit", "resnet") else vocabulary), **settings
        )
        factory = getattr(transformers, hf_workload.TASKS[TASKS.get(kind, "causal-lm")])
        model = factory.from_config(config)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):  # of BatchNorm, as after training
                buffer.uniform_()
        model.save_pretrained(Path(sys.argv[1], kind), max_shard_size="30KB")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
