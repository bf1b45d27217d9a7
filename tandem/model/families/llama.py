"""Llama 2 and 3, and two that differ in what layers see: Mistral (a window), SmolLM3 (layers without positions)."""

from __future__ import annotations

from dataclasses import replace

from tandem.model.config_fields import ConfigFields
from tandem.model.families.family import Defaults, Family, Identity, read_shape, read_windows
from tandem.model.spec import LayerSpec, ModelSpec


def read_llama(config: ConfigFields, identity: Identity) -> ModelSpec:
    """The plain form. `attention_bias` and `mlp_bias` are refused with whatever else is not taken."""
    config.choice("hidden_act", ["silu"], "silu")
    return read_shape(config, identity, family="llama")


def read_mistral(config: ConfigFields, identity: Identity) -> ModelSpec:
    """One window for all layers; without the field, transformers takes 4096, and null is none."""
    config.choice("hidden_act", ["silu"], "silu")
    spec = read_shape(config, identity, family="mistral")
    window = config.optional_integer("sliding_window", default=4096)
    return replace(spec, layers=(LayerSpec(window=window),) * spec.num_layers)


def read_smollm3(config: ConfigFields, identity: Identity) -> ModelSpec:
    """Every fourth layer knows no positions, unless `no_rope_layers` says which (0 there: none)."""
    config.choice("hidden_act", ["silu"], "silu")
    spec = read_shape(config, identity, family="smollm3", defaults=Defaults(theta=2e6, tied=True))
    interval = config.integer("no_rope_layer_interval", 4)
    rotated = config.integers("no_rope_layers", spec.num_layers)
    if rotated is None:
        rotated = [int((index + 1) % interval != 0) for index in range(spec.num_layers)]
    config.ignore("max_window_layers")  # said in every file, and not read by transformers either
    window = config.optional_integer("sliding_window")
    if not config.flag("use_sliding_window"):
        window = None
    windows = read_windows(config, spec.num_layers, window, default=[not rope for rope in rotated])
    layers = zip(windows, rotated[: spec.num_layers], strict=True)
    return replace(
        spec, layers=tuple(LayerSpec(window=window, rope=0 if rope else None) for window, rope in layers)
    )


FAMILIES = (
    Family(model_type="llama", architecture="LlamaForCausalLM", read=read_llama),
    Family(model_type="mistral", architecture="MistralForCausalLM", read=read_mistral),
    Family(model_type="smollm3", architecture="SmolLM3ForCausalLM", read=read_smollm3),
)
