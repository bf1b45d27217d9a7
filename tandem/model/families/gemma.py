"""Gemma 2 and the text model of Gemma 3 (arXiv:2408.00118, arXiv:2503.19786).

Against Llama: norms of 1 + weight before and after each half of a layer, scaled embeddings, a scale of scores of its
own, tanh GELU, windows in most layers; capped scores and logits in 2, norms of heads and two kinds of positions in 3.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.model.config_fields import ConfigFields
from tandem.model.families.family import Defaults, Family, Identity, read_rope_section, read_shape, read_windows
from tandem.model.families.qwen import HEAD_NORMS
from tandem.model.spec import LayerSpec, ModelSpec, RopeSpec
from tandem.model.tensor_names import AttentionNames, TensorNames

_GEMMA2 = TensorNames(
    attention=AttentionNames(post_norm="post_attention_layernorm.weight"),
    mlp_norm="pre_feedforward_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
)
_GEMMA3 = replace(_GEMMA2, attention=replace(HEAD_NORMS, post_norm=_GEMMA2.attention.post_norm))
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4


def read_gemma2(config: ConfigFields, identity: Identity) -> ModelSpec:
    """Every other layer has a window, the first among them, unless `layer_types` says which."""
    shape = _shared(config, read_shape(config, identity, family="gemma2", defaults=Defaults(tied=True)))
    windows = _windows(config, shape.num_layers, pattern=2)
    return replace(
        shape,
        layers=tuple(LayerSpec(window=window) for window in windows),
        attention_softcap=config.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=config.optional_number("final_logit_softcapping", 30.0),
    )


def read_gemma3(config: ConfigFields, identity: Identity) -> ModelSpec:
    """Every sixth layer sees all, with positions of its own, unless `layer_types` says which."""
    defaults, ropes = Defaults(tied=True), _ropes(config)
    spec = _shared(config, read_shape(config, identity, family="gemma3_text", defaults=defaults, ropes=ropes))
    config.ignore("_sliding_window_pattern")  # how transformers writes what `layer_types` says too
    windows = _windows(config, spec.num_layers, pattern=config.integer("sliding_window_pattern", 6))
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := config.optional_number(field)) is not None:
            raise config.unsupported(field, cap, "Gemma 3 has none")
    return replace(
        spec, layers=tuple(LayerSpec(window=window, rope=0 if window is None else 1) for window in windows)
    )


def _shared(config: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """What both have in common. `hidden_act` is there too in many files, and not read by transformers either."""
    config.ignore("hidden_act")
    config.choice("hidden_activation", ["gelu_pytorch_tanh"], "gelu_pytorch_tanh")
    config.integer("head_dim")
    scalar = config.number("query_pre_attn_scalar", 256.0)
    return replace(
        spec,
        activation="gelu_tanh",
        attention_scale=scalar**-0.5,
        norm_offset=1.0,
        embedding_scale=spec.hidden_size**0.5,
    )


def _windows(config: ConfigFields, num_layers: int, *, pattern: int) -> list[int | None]:
    window = config.integer("sliding_window", 4096)
    default = [(index + 1) % pattern != 0 for index in range(num_layers)]
    return read_windows(config, num_layers, window, default=default)


def _ropes(config: ConfigFields) -> tuple[RopeSpec, ...]:
    """Of layers that see all, and of those with a window: side by side in transformers 5, in three fields before."""
    theta = config.number("rope_theta", _GLOBAL_THETA)
    local = config.number("rope_local_base_freq", _LOCAL_THETA)
    both = config.section("rope_parameters")
    if both is None:
        scaled = config.section("rope_scaling")
        full = RopeSpec(theta=theta) if scaled is None else read_rope_section(scaled, theta, config)
        return full, RopeSpec(theta=local)
    full_section, local_section = both.section("full_attention"), both.section("sliding_attention")
    both.refuse_rest()
    return (
        RopeSpec(theta=theta) if full_section is None else read_rope_section(full_section, theta, config),
        RopeSpec(theta=local) if local_section is None else read_rope_section(local_section, local, config),
    )


FAMILIES = (
    Family(model_type="gemma2", architecture="Gemma2ForCausalLM", read=read_gemma2, names=_GEMMA2),
    Family(model_type="gemma3_text", architecture="Gemma3ForCausalLM", read=read_gemma3, names=_GEMMA3),
)
