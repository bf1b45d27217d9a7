"""A model's weights in the form the forward pass wants: one dataclass for each kind of part.

Shapes: hidden size H; `q` and `kv` the widths of all query and of all key (or value) heads; I the intermediate size;
of heads, intermediate size and vocabulary those of this rank (`parallel.py`).
Matrices are `[in, out]` (`linear.py` owns their memory order). Norms are fp32 whatever the precision of the matrices,
biases have theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.model.linear import Matrix
from tandem.model.rope import RotaryFrequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """Self-attention of one layer."""

    norm: torch.Tensor
    """`[H]`"""
    qkv: Matrix
    """`[H, q + 2 kv]`"""
    qkv_bias: torch.Tensor | None
    """`[q + 2 kv]`"""
    q_norm: torch.Tensor | None
    """`[head_dim]`, the same for every head; `k_norm` too."""
    k_norm: torch.Tensor | None
    output: Matrix
    """`[q, H]`"""
    post_norm: torch.Tensor | None
    """`[H]`, applied before the residual is added."""

    def matrices(self) -> list[Matrix]:
        """Both."""
        return [self.qkv, self.output]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeights:
    """A gated MLP, or one expert."""

    gate_up: Matrix
    """`[H, 2 I]`"""
    down: Matrix
    """`[I, H]`"""

    def matrices(self) -> list[Matrix]:
        """Both."""
        return [self.gate_up, self.down]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsWeights:
    """A mixture of experts. `experts` are those of this rank, from `first` on."""

    router: Matrix
    """`[H, num_experts]`"""
    experts: tuple[DenseWeights, ...]
    first: int = 0

    def matrices(self) -> list[Matrix]:
        """All experts' too, though a batch of one token reads few."""
        return [self.router] + [m for expert in self.experts for m in expert.matrices()]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention: AttentionWeights
    mlp_norm: torch.Tensor
    """`[H]`"""
    mlp: DenseWeights | ExpertsWeights
    mlp_post_norm: torch.Tensor | None
    """`[H]`, applied before the residual is added."""

    def matrices(self) -> list[Matrix]:
        """Every matrix of the layer."""
        return self.attention.matrices() + self.mlp.matrices()


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What one rank has of a model; all of it where there is one rank.

    What a family adds to norms or multiplies embeddings by is in the numbers already. Embedding, final norm and output
    matrix have no elements on ranks of stages that do not use them.
    """

    embedding: torch.Tensor
    """`[vocab, H]`"""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    """`[H]`"""
    lm_head: Matrix
    """`[H, vocab]`; its own copy also when tied, because lookups need the other order."""
    frequencies: tuple[RotaryFrequencies, ...]
    """One for each of the spec's kinds of positions."""

    def matrices(self) -> list[Matrix]:
        """Every matrix that one decode iteration may read."""
        return [self.lm_head] + [m for layer in self.layers for m in layer.matrices()]

    @property
    def num_bytes(self) -> int:
        """Memory that matrices and embedding take."""
        return sum(m.numel() * m.element_size() for m in [self.embedding, *self.matrices()])
