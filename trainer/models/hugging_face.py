"""The built-in model in Hugging Face's format: tensor names, `config.json`, and unsupported settings.

Both models rotate the halves of a head against each other, so weights need only new names, not a permutation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.protocol.config_sections.recipe_config import ModelConfig, RopeScalingConfig

_OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
TIED = ("model.embed_tokens.weight", "lm_head.weight")
"""Names of a file's two copies of tied weights."""
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
_BIASES = {f"attention.w{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_HEAD_NORMS = {f"attention.{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
_EXPERTS = {
    "feed_forward.router.weight": "block_sparse_moe.gate.weight",
    "feed_forward.router.moves": "block_sparse_moe.moves",
    **{f"feed_forward.experts.{matrix}": f"block_sparse_moe.experts.{matrix}" for matrix in ("w1", "w2", "w3")},
}
"""Names as `expert_stacks.py` has them; files have one matrix for each expert, and no adjustments."""
_REQUIRED = {"mlp_bias": False, "partial_rotary_factor": 1.0}
_DEFAULTS = {"rms_norm_eps": 1e-6, "max_window_layers": 28}
"""Values of transformers for keys that a file leaves out."""
_NUMBERS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "rms_norm_eps", "sliding_window", "rope_theta", "vocab_size", "num_local_experts", "num_experts_per_tok",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A class of `transformers` that computes what the built-in model computes with these settings."""

    model_type: str
    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: bool = False
    """Whether it can have a sliding window."""
    has_experts: bool = False
    rope_theta: float = 1e4
    """Value of transformers for a file without one."""


ARCHITECTURES = (
    Architecture(model_type="llama", name="LlamaForCausalLM"),
    Architecture(model_type="mistral", name="MistralForCausalLM", windows=True),
    Architecture(model_type="mixtral", name="MixtralForCausalLM", windows=True, has_experts=True, rope_theta=1e6),
    Architecture(model_type="qwen2", name="Qwen2ForCausalLM", qkv_bias=True),
    Architecture(model_type="qwen3", name="Qwen3ForCausalLM", qk_norm=True),
)


def find_architecture(config: ModelConfig) -> Architecture | None:
    """Return the first architecture with the model's features, or None."""

    def fits(one: Architecture) -> bool:
        has_experts = config.experts.count > 0
        alike = (one.qkv_bias, one.qk_norm, one.has_experts) == (
            config.attention.qkv_bias,
            config.attention.qk_norm,
            has_experts,
        )
        return alike and (one.windows or not config.attention.window)

    sigmoid = config.experts.count > 0 and config.experts.scores != "softmax"
    return None if sigmoid else next(filter(fits, ARCHITECTURES), None)


def names(config: ModelConfig) -> dict[str, str]:
    """Map each parameter's orch name to its Hugging Face name; tied embeddings have no output matrix."""
    found = dict(_OUTSIDE_LAYERS)
    if config.tie_embeddings:
        del found["output.weight"]
    inside = (
        _INSIDE_LAYERS
        | (_BIASES if config.attention.qkv_bias else {})
        | (_HEAD_NORMS if config.attention.qk_norm else {})
    )
    if config.experts.count:
        inside = {mine: their for mine, their in inside.items() if not mine.startswith("feed_forward")} | _EXPERTS
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        found.update({ours + mine: theirs + their for mine, their in inside.items()})
    return found


def is_unneeded(name: str, config: ModelConfig) -> bool:
    """Return whether a Hugging Face tensor is redundant: a rotary table, or the second copy of tied weights."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def config_json(config: ModelConfig, *, seq_len: int, dtype: str) -> dict[str, Any]:
    """Return `config.json` for `transformers`; its vocabulary includes the padding, so that all logits match.

    The model has an architecture (`find_architecture`).
    """
    architecture = find_architecture(config)
    assert architecture is not None
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, **_rope_json(config.rope_scaling)}
    window = {"sliding_window": config.attention.window or None} if architecture.windows else {}
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": config.embedding_rows,
        "hidden_size": config.dim,
        "intermediate_size": config.experts.ffn_dim if architecture.has_experts else config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        **window,
        **(
            {"num_local_experts": config.experts.count, "num_experts_per_tok": config.experts.per_token}
            if architecture.has_experts
            else {}
        ),
        "max_position_embeddings": seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        # Two keys for the same value: release 5 reads the second one, and older releases read the first.
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": _rope_json(config.rope_scaling) or None,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _rope_json(scaling: RopeScalingConfig) -> dict[str, Any]:
    if scaling.kind == "none":
        return {}
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        found |= {
            "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        }  # fmt: skip
    return found


def mismatches(theirs: Mapping[str, Any], config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting of a foreign `config.json` that does not fit, with the override that fixes it (or "")."""
    kind = theirs.get("model_type", "llama")
    architecture = next((one for one in ARCHITECTURES if one.model_type == kind), None)
    if architecture is None:
        known = ", ".join(one.model_type for one in ARCHITECTURES)
        yield f"its model_type is {kind!r}; the built-in model supports only {known}", ""
        return
    malformed = list(_list_malformed(theirs))
    yield from malformed
    if malformed:
        return
    if theirs.get("quantization_config"):
        yield "its weights are quantized (quantization_config); the built-in model reads full weights", ""
    if (activation := theirs.get("hidden_act", "silu")) not in ("silu", "swish"):
        yield f"its hidden_act is {activation!r}; the built-in model supports only 'silu'", ""
    if len(set(_windows_of_layers(theirs))) > 1:
        yield "only some of its layers have a sliding window; the built-in model supports one for all", ""
    for key, wanted in _REQUIRED.items():
        if (found := theirs.get(key, wanted)) != wanted:
            yield f"its {key} is {found!r}; the built-in model supports only {wanted!r}", ""
    if theirs.get("attention_bias") and not architecture.qkv_bias:
        yield "its attention_bias is True; the built-in model has none after attention", ""
    for field, value in (("qkv_bias", architecture.qkv_bias), ("qk_norm", architecture.qk_norm)):
        if value != getattr(config.attention, field):
            key = f"model.attention.{field}"
            yield f"{architecture.name} needs {key}", f"{key}={str(value).lower()}"
    yield from _rope_mismatches(theirs, config.rope_scaling)
    if not architecture.has_experts and config.experts.count:
        yield f"{architecture.name} has no experts", "model.experts.count=0"
    if architecture.has_experts and config.experts.scores != "softmax":
        yield f"{architecture.name} weights experts by a softmax", "model.experts.scores=softmax"
    for key, field, value in _sizes(theirs, architecture):
        section, _, name = field.rpartition(".")
        mine = getattr(getattr(config, section) if section else config, name)
        if name == "head_dim" and not mine:  # what it is once the other keys fit
            mine = _even_head_dim(theirs)
        if value is not None and value != mine:
            setting = str(value).lower() if isinstance(value, bool) else value
            yield f"its {key} is {value}, model.{field} is {mine}", f"model.{field}={setting}"
    # The vocabulary may be given with or without its padding.
    vocabulary = theirs.get("vocab_size")
    if isinstance(vocabulary, int) and not config.vocab_size <= vocabulary <= config.embedding_rows:
        mismatch = f"its vocab_size is {vocabulary}, model.vocab_size is {config.vocab_size}"
        yield mismatch, f"model.vocab_size={vocabulary}"


def _list_malformed(theirs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in _NUMBERS:
        found = theirs.get(key)
        if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
            yield f"its {key} is {found!r}; it must be a number", ""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(theirs.get(key) or {}, Mapping):
            yield f"its {key} is {theirs[key]!r}; it must be a mapping", ""


def _windows_of_layers(theirs: Mapping[str, Any]) -> list[int]:
    """Return the sliding window of each layer, 0 for none. Qwen has one only if `use_sliding_window` is set."""
    layers, window = int(theirs.get("num_hidden_layers") or 1), int(theirs.get("sliding_window") or 0)
    is_qwen, kinds = str(theirs.get("model_type")).startswith("qwen"), theirs.get("layer_types")
    if is_qwen and not theirs.get("use_sliding_window"):
        return [0]
    if isinstance(kinds, list):
        return [window if kind == "sliding_attention" else 0 for kind in kinds] or [0]
    full = int(theirs.get("max_window_layers", _DEFAULTS["max_window_layers"])) if is_qwen else 0
    return [window if layer >= full else 0 for layer in range(layers)]


def _sizes(theirs: Mapping[str, Any], architecture: Architecture) -> Iterator[tuple[str, str, Any]]:
    yield "hidden_size", "dim", theirs.get("hidden_size")
    yield "num_hidden_layers", "layers", theirs.get("num_hidden_layers")
    yield "num_attention_heads", "heads", theirs.get("num_attention_heads")
    yield "num_key_value_heads", "kv_heads", theirs.get("num_key_value_heads", theirs.get("num_attention_heads"))
    yield "head_dim", "attention.head_dim", _head_dim(theirs)
    inner = theirs.get("intermediate_size")
    if architecture.has_experts:
        yield "num_local_experts", "experts.count", theirs.get("num_local_experts")
        yield "num_experts_per_tok", "experts.per_token", theirs.get("num_experts_per_tok")
        yield "intermediate_size", "experts.ffn_dim", inner
    else:
        yield "intermediate_size", "ffn_dim", inner
    yield "rms_norm_eps", "norm_eps", theirs.get("rms_norm_eps", _DEFAULTS["rms_norm_eps"])
    yield "tie_word_embeddings", "tie_embeddings", theirs.get("tie_word_embeddings")
    yield "sliding_window", "attention.window", max(_windows_of_layers(theirs))
    theta = _rope(theirs).get("rope_theta", theirs.get("rope_theta"))
    yield "rope_theta", "rope_theta", architecture.rope_theta if theta is None else theta


def _head_dim(theirs: Mapping[str, Any]) -> int | None:
    given = theirs.get("head_dim")
    return int(given) if given else _even_head_dim(theirs)


def _even_head_dim(theirs: Mapping[str, Any]) -> int | None:
    width, heads = theirs.get("hidden_size"), theirs.get("num_attention_heads")
    return width // heads if width and heads else None


def _rope(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the rotary embedding, which releases before 5 name `rope_scaling`."""
    return theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}


def _rope_mismatches(theirs: Mapping[str, Any], mine: RopeScalingConfig) -> Iterator[tuple[str, str]]:
    rope = _rope(theirs)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        yield f"its rotary embedding is scaled ({kind}); the built-in model supports linear and llama3", ""
        return
    wanted: dict[str, Any] = {"kind": "none" if kind == "default" else kind}
    if kind != "default":
        wanted["factor"] = rope.get("factor")
    if kind == "llama3":
        wanted |= {key: rope.get(key) for key in ("low_freq_factor", "high_freq_factor")}
        wanted["original_length"] = rope.get("original_max_position_embeddings")
    for field, value in wanted.items():
        if value is not None and value != getattr(mine, field):
            key = f"model.rope_scaling.{field}"
            yield f"its rotary embedding has {field} {value}, {key} is {getattr(mine, field)}", f"{key}={value}"
