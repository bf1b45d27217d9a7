"""What a checkpoint calls its tensors: one table per family and file format, read by `assemble.py`.

A name that is None says that the family has no such tensor. `{layer}` and `{expert}` stand for numbers. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNames:
    """One layer's attention, after the layer's prefix."""

    norm: str = "input_layernorm.weight"
    q: str = "self_attn.q_proj.weight"
    k: str = "self_attn.k_proj.weight"
    v: str = "self_attn.v_proj.weight"
    q_bias: str | None = None
    k_bias: str | None = None
    v_bias: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    output: str = "self_attn.o_proj.weight"
    post_norm: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseNames:
    """A gated MLP, after the layer's prefix; of one expert where `{expert}` is in the names."""

    gate: str = "mlp.gate_proj.weight"
    up: str = "mlp.up_proj.weight"
    down: str = "mlp.down_proj.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """A whole model."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    """Prefix of all that follows."""
    attention: AttentionNames = AttentionNames()
    mlp_norm: str = "post_attention_layernorm.weight"
    mlp_post_norm: str | None = None
    dense: DenseNames = DenseNames()
    router: str | None = None
    expert: DenseNames | None = None


HUGGING_FACE = TensorNames()
"""What most families share."""
