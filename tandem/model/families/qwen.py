"""Qwen 2, 2.5 and 3: Llama with biases on Q, K and V (2), or with norms on each head's query and key (3)."""

from __future__ import annotations

from dataclasses import replace

from tandem.model.config_fields import ConfigFields
from tandem.model.families.family import Family, Identity, read_shape, read_windows
from tandem.model.spec import LayerSpec, ModelSpec
from tandem.model.tensor_names import HUGGING_FACE, AttentionNames

HEAD_NORMS = AttentionNames(q_norm="self_attn.q_norm.weight", k_norm="self_attn.k_norm.weight")
_QWEN2 = AttentionNames(
    q_bias="self_attn.q_proj.bias", k_bias="self_attn.k_proj.bias", v_bias="self_attn.v_proj.bias"
)


def read_qwen2(config: ConfigFields, identity: Identity) -> ModelSpec:
    """Heads as wide as the hidden size allows."""
    config.choice("hidden_act", ["silu"], "silu")
    return _windowed(config, read_shape(config, identity, family="qwen2"))


def read_qwen3(config: ConfigFields, identity: Identity) -> ModelSpec:
    """The width of heads is a number of its own, which must be there: the family's default is not Llama's."""
    config.choice("hidden_act", ["silu"], "silu")
    config.integer("head_dim")
    return _windowed(config, read_shape(config, identity, family="qwen3"))


def _windowed(config: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """With `use_sliding_window`, layers from `max_window_layers` on have a window, unless `layer_types` says which."""
    window = config.optional_integer("sliding_window", default=4096)
    if not config.flag("use_sliding_window"):
        window = None
    first = config.integer("max_window_layers", 28, least=0)
    default = [index >= first for index in range(spec.num_layers)]
    windows = read_windows(config, spec.num_layers, window, default=default)
    return replace(spec, layers=tuple(LayerSpec(window=each) for each in windows))


FAMILIES = (
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        read=read_qwen2,
        names=replace(HUGGING_FACE, attention=_QWEN2),
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        read=read_qwen3,
        names=replace(HUGGING_FACE, attention=HEAD_NORMS),
    ),
)
