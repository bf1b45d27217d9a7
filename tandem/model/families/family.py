"""What a family is: how its config.json becomes a spec, and what its checkpoints call their tensors.

Also the parts of that step that families share: shape and positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tandem.model.config_fields import ConfigFields
from tandem.model.spec import (
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from tandem.model.tensor_names import HUGGING_FACE, TensorNames


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a spec says that is not in config.json."""

    name: str
    eos_token_ids: tuple[int, ...]
    weights_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One `model_type`."""

    model_type: str
    architecture: str
    """The class of transformers that has the language model's head."""
    read: Callable[[ConfigFields, Identity], ModelSpec]
    """Takes every field that matters. Raises ModelLoadError, naming field and value."""
    names: TensorNames = HUGGING_FACE


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What a family takes for fields that are not there."""

    theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tied: bool = False


def read_shape(
    config: ConfigFields,
    identity: Identity,
    *,
    family: str,
    defaults: Defaults = Defaults(),
    ropes: tuple[RopeSpec, ...] = (),
) -> ModelSpec:
    """Full causal attention with the first kind of positions in every layer: a Llama, which other families change.

    Without `ropes`, there is one kind, as the shared fields say.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", hidden // max(heads, 1))
    num_layers = config.integer("num_hidden_layers")
    ropes = ropes or (read_rope(config, defaults.theta),)
    return ModelSpec(
        name=identity.name,
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_context_tokens=_context(config.integer("max_position_embeddings"), ropes[0].scaling),
        rms_norm_eps=config.number("rms_norm_eps", defaults.rms_norm_eps),
        tie_word_embeddings=config.flag("tie_word_embeddings", defaults.tied),
        eos_token_ids=identity.eos_token_ids,
        weights_digest=identity.weights_digest,
        ropes=ropes,
        layers=(LayerSpec(),) * num_layers,
        attention_scale=head_dim**-0.5,
    )


def read_windows(config: ConfigFields, num_layers: int, window: int | None, *, default: list[bool]) -> list[int | None]:
    """The window of each layer, None where it sees all: from `layer_types`, else `default` says which have it."""
    kinds = config.value("layer_types")
    if kinds is None:
        return [window if slides else None for slides in default]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error(f"layer_types must have an entry for each of {num_layers} layers, got {kinds!r}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.unsupported("layer_types", kind)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def read_rope(config: ConfigFields, theta: float) -> RopeSpec:
    """From where transformers 5 (`rope_parameters`) or 4 (`rope_scaling`, `rope_theta`) writes them."""
    outer = config.number("rope_theta", theta)
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.unsupported("partial_rotary_factor", config.value("partial_rotary_factor"))
    sections = [config.section("rope_scaling"), config.section("rope_parameters")]
    found = next((section for section in sections if section is not None), None)
    return RopeSpec(theta=outer) if found is None else read_rope_section(found, outer, config)


def read_rope_section(section: ConfigFields, theta: float, config: ConfigFields) -> RopeSpec:
    """One kind of positions. `config` is what the section is in."""
    section.ignore("rope_type", "type")
    kind = section.choice("type" if section.value("rope_type") is None else "rope_type", list(_SCALINGS), "default")
    base = section.number("rope_theta", theta)
    if section.number("partial_rotary_factor", 1.0) != 1.0:
        raise section.unsupported("partial_rotary_factor", section.value("partial_rotary_factor"))
    scaling = _SCALINGS[kind](section, config)
    section.refuse_rest()
    return RopeSpec(theta=base, scaling=scaling)


def _unscaled(section: ConfigFields, config: ConfigFields) -> None:
    section.ignore("factor", "original_max_position_embeddings")


def _linear(section: ConfigFields, config: ConfigFields) -> LinearScaling:
    return LinearScaling(factor=section.number("factor"))


def _llama3(section: ConfigFields, config: ConfigFields) -> Llama3Scaling:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise section.unsupported("high_freq_factor", high, f"more than low_freq_factor, {low}, is")
    return Llama3Scaling(
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_tokens=_original_context(section, config),
    )


def _yarn(section: ConfigFields, config: ConfigFields) -> YarnScaling:
    factor = section.number("factor")
    if section.value("mscale") or section.value("mscale_all_dim"):
        raise section.unsupported("mscale", section.value("mscale"))
    return YarnScaling(
        factor=factor,
        original_context_tokens=_original_context(section, config),
        attention_factor=section.number("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
    )


_SCALINGS: dict[str, Callable[[ConfigFields, ConfigFields], RopeScaling | None]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _original_context(section: ConfigFields, config: ConfigFields) -> int:
    return section.integer("original_max_position_embeddings", config.integer("max_position_embeddings"))


def _context(max_position_embeddings: int, scaling: RopeScaling | None) -> int:
    """YaRN's configuration says how far it stretches, whether or not the context's length was changed with it."""
    if isinstance(scaling, YarnScaling):
        return max(max_position_embeddings, int(scaling.factor * scaling.original_context_tokens))
    return max_position_embeddings
