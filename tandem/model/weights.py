"""A Llama model's weights in the form the forward pass wants: checked against the spec, and fused.

Owns which tensors there are and how they join; `linear.py` owns the memory order of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.errors import ModelLoadError
from tandem.model.linear import empty_matrix
from tandem.model.spec import ModelSpec

Reader = Callable[[str], torch.Tensor]
"""Gives a tensor by its Hugging Face name (`model.layers.0.self_attn.q_proj.weight`), as `[out, in]` or `[out]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer. `hidden` H, `q` and `kv` the widths of all query and of all key (or value) heads."""

    attention_norm: torch.Tensor
    """`[H]`"""
    qkv: torch.Tensor
    """`[H, q + 2 kv]`"""
    output: torch.Tensor
    """`[q, H]`"""
    mlp_norm: torch.Tensor
    """`[H]`"""
    gate_up: torch.Tensor
    """`[H, 2 * intermediate]`"""
    down: torch.Tensor
    """`[intermediate, H]`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A whole model. Norms are fp32 whatever the precision of the matrices."""

    embedding: torch.Tensor
    """`[vocab, H]`"""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    """`[H]`"""
    lm_head: torch.Tensor
    """`[H, vocab]`; its own copy also when tied, because lookups need the other order."""
    inverse_frequencies: torch.Tensor
    """`[head_dim / 2]` fp32: the rotary frequencies, scaling included."""

    def matrices(self) -> list[torch.Tensor]:
        """Every matrix that one decode iteration reads."""
        return [self.lm_head] + [m for w in self.layers for m in (w.qkv, w.output, w.gate_up, w.down)]


class _Assembler:
    """Reads, checks and fuses."""

    def __init__(self, read: Reader, dtype: torch.dtype, origin: str) -> None:
        self._read = read
        self._dtype = dtype
        self._origin = origin

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        value = self._read(name)
        if tuple(value.shape) != shape:
            raise ModelLoadError(f"{self._origin}: tensor {name} has shape {tuple(value.shape)}, expected {shape}")
        return value

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self.tensor(name, size).to(torch.float32)

    def fused(self, num_in: int, parts: dict[str, int]) -> torch.Tensor:
        """Parts side by side as `[in, sum of outs]`, each given as name and its number of outputs."""
        matrix = empty_matrix(num_in, sum(parts.values()), self._dtype)
        start = 0
        for name, size in parts.items():
            matrix[:, start : start + size] = self.tensor(name, size, num_in).t()
            start += size
        return matrix

    def layer(self, index: int, spec: ModelSpec) -> LayerWeights:
        p = f"model.layers.{index}."
        hidden, intermediate = spec.hidden_size, spec.intermediate_size
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = p + "self_attn.", p + "mlp."
        qkv = {attention + "q_proj.weight": q, attention + "k_proj.weight": kv, attention + "v_proj.weight": kv}
        gate_up = {mlp + "gate_proj.weight": intermediate, mlp + "up_proj.weight": intermediate}
        return LayerWeights(
            attention_norm=self.norm(p + "input_layernorm.weight", hidden),
            qkv=self.fused(hidden, qkv),
            output=self.fused(q, {attention + "o_proj.weight": hidden}),
            mlp_norm=self.norm(p + "post_attention_layernorm.weight", hidden),
            gate_up=self.fused(hidden, gate_up),
            down=self.fused(intermediate, {mlp + "down_proj.weight": hidden}),
        )


def assemble(
    spec: ModelSpec, read: Reader, *, dtype: torch.dtype, inverse_frequencies: torch.Tensor, origin: str
) -> Weights:
    """Builds the weights from a reader. Raises ModelLoadError, naming `origin`, for a tensor of the wrong shape."""
    parts = _Assembler(read, dtype, origin)
    embedding = parts.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size).to(dtype)
    tied = _Assembler(lambda _: embedding, dtype, origin)
    head = tied if spec.tie_word_embeddings else parts
    return Weights(
        embedding=embedding,
        layers=tuple(parts.layer(index, spec) for index in range(spec.num_layers)),
        final_norm=parts.norm("model.norm.weight", spec.hidden_size),
        lm_head=head.fused(spec.hidden_size, {"lm_head.weight": spec.vocab_size}),
        inverse_frequencies=inverse_frequencies,
    )
