"""The built-in model in Hugging Face's format: tensor names, `config.json`, and unsupported settings.

Both models rotate the halves of a head against each other, so weights need only new names, not a permutation.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.protocol.config_sections.recipe_config import ModelConfig

_OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE_LAYERS = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
_REQUIRED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def names(config: ModelConfig) -> dict[str, str]:
    """Map each parameter's orch name to its Hugging Face name; tied embeddings have no output matrix."""
    found = dict(_OUTSIDE_LAYERS)
    if config.tie_embeddings:
        del found["output.weight"]
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        found.update({ours + mine: theirs + their for mine, their in _INSIDE_LAYERS.items()})
    return found


def is_unneeded(name: str, config: ModelConfig) -> bool:
    """Return whether a Hugging Face tensor is redundant: a rotary table, or the second copy of tied weights."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def config_json(config: ModelConfig, *, seq_len: int, dtype: str) -> dict[str, Any]:
    """Return `config.json` for `transformers`; its vocabulary includes the padding, so that all logits match."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.embedding_rows,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.dim // config.heads,
        "max_position_embeddings": seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        # Two keys for the same value: release 5 reads the second one, and older releases read the first.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def mismatches(theirs: Mapping[str, Any], config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting of a foreign `config.json` that does not fit, with the override that fixes it (or "")."""
    if config.experts.count:
        yield "it has no experts, like every Llama", "model.experts.count=0"
    for key, wanted in _REQUIRED.items():
        found = theirs.get(key, wanted)
        if found != wanted:
            yield f"its {key} is {found!r}; the built-in model supports only {wanted!r}", ""
    yield from _rope_mismatches(theirs)
    heads = theirs.get("num_attention_heads", config.heads)
    width = theirs.get("head_dim") or theirs.get("hidden_size", config.dim) // max(1, heads)
    if width * heads != theirs.get("hidden_size", config.dim):
        yield f"its heads are {width} wide; the built-in model supports only hidden_size / num_attention_heads", ""
    for key, field, value in _sizes(theirs):
        mine = getattr(config, field)
        if value is not None and value != mine:
            setting = str(value).lower() if isinstance(value, bool) else value
            yield f"its {key} is {value}, model.{field} is {mine}", f"model.{field}={setting}"
    # The vocabulary may be given with or without its padding.
    vocabulary = theirs.get("vocab_size")
    if isinstance(vocabulary, int) and not config.vocab_size <= vocabulary <= config.embedding_rows:
        mismatch = f"its vocab_size is {vocabulary}, model.vocab_size is {config.vocab_size}"
        yield mismatch, f"model.vocab_size={vocabulary}"


def _sizes(theirs: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    yield "hidden_size", "dim", theirs.get("hidden_size")
    yield "num_hidden_layers", "layers", theirs.get("num_hidden_layers")
    yield "num_attention_heads", "heads", theirs.get("num_attention_heads")
    yield "num_key_value_heads", "kv_heads", theirs.get("num_key_value_heads", theirs.get("num_attention_heads"))
    yield "intermediate_size", "ffn_dim", theirs.get("intermediate_size")
    yield "rms_norm_eps", "norm_eps", theirs.get("rms_norm_eps")
    yield "tie_word_embeddings", "tie_embeddings", theirs.get("tie_word_embeddings")
    rope = theirs.get("rope_parameters") or {}
    yield "rope_theta", "rope_theta", rope.get("rope_theta", theirs.get("rope_theta"))


def _rope_mismatches(theirs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for place in ("rope_parameters", "rope_scaling"):
        rope = theirs.get(place) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            yield f"its rotary embedding is scaled ({place}: {kind}); the built-in model's is not", ""
