"""Mixtures of experts: Mixtral, and Qwen 3's, in which some layers may have a dense MLP instead."""

from __future__ import annotations

from dataclasses import replace

from tandem.model.config_fields import ConfigFields
from tandem.model.families.family import Defaults, Family, Identity, read_shape
from tandem.model.families.qwen import HEAD_NORMS
from tandem.model.spec import ExpertsSpec, LayerSpec, ModelSpec
from tandem.model.tensor_names import HUGGING_FACE, DenseNames

_MIXTRAL = replace(
    HUGGING_FACE,
    router="block_sparse_moe.gate.weight",
    expert=DenseNames(
        gate="block_sparse_moe.experts.{expert}.w1.weight",
        up="block_sparse_moe.experts.{expert}.w3.weight",
        down="block_sparse_moe.experts.{expert}.w2.weight",
    ),
)
_QWEN3_MOE = replace(
    HUGGING_FACE,
    attention=HEAD_NORMS,
    router="mlp.gate.weight",
    expert=DenseNames(
        gate="mlp.experts.{expert}.gate_proj.weight",
        up="mlp.experts.{expert}.up_proj.weight",
        down="mlp.experts.{expert}.down_proj.weight",
    ),
)


def read_mixtral(config: ConfigFields, identity: Identity) -> ModelSpec:
    """Experts in every layer; their shares always sum to 1."""
    config.choice("hidden_act", ["silu"], "silu")
    spec = read_shape(config, identity, family="mixtral", defaults=Defaults(theta=1e6, rms_norm_eps=1e-5))
    window = config.optional_integer("sliding_window")
    experts = ExpertsSpec(
        num_experts=config.integer("num_local_experts", 8),
        num_chosen=config.integer("num_experts_per_tok", 2),
        intermediate_size=spec.intermediate_size,
        normalised=True,
    )
    return replace(
        spec, layers=(LayerSpec(window=window, has_experts=True),) * spec.num_layers, experts=_checked(config, experts)
    )


def read_qwen3_moe(config: ConfigFields, identity: Identity) -> ModelSpec:
    """Experts in every `decoder_sparse_step`th layer but those of `mlp_only_layers`. Windows are refused."""
    config.choice("hidden_act", ["silu"], "silu")
    spec = read_shape(config, identity, family="qwen3_moe")
    config.ignore("sliding_window", "max_window_layers")  # said in every file, and used with use_sliding_window only
    step, dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers") or []
    experts = ExpertsSpec(
        num_experts=config.integer("num_experts", config.integer("num_local_experts", 128)),
        num_chosen=config.integer("num_experts_per_tok", 8),
        intermediate_size=config.integer("moe_intermediate_size", 768),
        normalised=config.flag("norm_topk_prob"),
    )
    layers = tuple(
        LayerSpec(has_experts=index not in dense and (index + 1) % step == 0) for index in range(spec.num_layers)
    )
    return replace(spec, layers=layers, experts=_checked(config, experts))


def _checked(config: ConfigFields, experts: ExpertsSpec) -> ExpertsSpec:
    if not 1 <= experts.num_chosen <= experts.num_experts:
        raise config.unsupported("num_experts_per_tok", experts.num_chosen, f"1 to {experts.num_experts} are")
    return experts


FAMILIES = (
    Family(model_type="mixtral", architecture="MixtralForCausalLM", read=read_mixtral, names=_MIXTRAL),
    Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=read_qwen3_moe, names=_QWEN3_MOE),
)
