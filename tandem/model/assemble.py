"""From tensors as a checkpoint names them to `Weights`: checked against the spec, and fused.

Owns which tensors join and how; what they are called is in `tensor_names.py`, how they are read is the loaders'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tandem.errors import ModelLoadError
from tandem.model.linear import empty_matrix
from tandem.model.rope import RotaryFrequencies
from tandem.model.spec import ModelSpec
from tandem.model.tensor_names import AttentionNames, DenseNames, TensorNames
from tandem.model.weights import AttentionWeights, DenseWeights, ExpertsWeights, LayerWeights, Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """Where tensors come from."""

    read: Callable[[str], torch.Tensor]
    """Gives a tensor by its name, matrices as `[out, in]`. Raises ModelLoadError when it is not there."""
    names: TensorNames
    origin: str
    """For messages."""


class Assembler:
    """Reads, checks and fuses."""

    def __init__(self, spec: ModelSpec, source: TensorSource, dtype: torch.dtype) -> None:
        self._spec = spec
        self._source = source
        self._names = source.names
        self._dtype = dtype

    def weights(self, frequencies: tuple[RotaryFrequencies, ...]) -> Weights:
        """All of it. Raises ModelLoadError, naming origin and tensor."""
        spec, names = self._spec, self._names
        embedding = self._tensor(names.embedding, spec.vocab_size, spec.hidden_size).to(self._dtype)
        return Weights(
            embedding=self._scaled(embedding),
            layers=tuple(self._layer(index) for index in range(spec.num_layers)),
            final_norm=self._norm(names.final_norm, spec.hidden_size),
            lm_head=self._lm_head(embedding),
            frequencies=frequencies,
        )

    def _scaled(self, embedding: torch.Tensor) -> torch.Tensor:
        """In the weights' own precision, as the families that scale do it."""
        if self._spec.embedding_scale == 1.0:
            return embedding
        return embedding * torch.tensor(self._spec.embedding_scale).to(self._dtype)

    def _lm_head(self, embedding: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        if not spec.tie_word_embeddings:
            return self._matrix(spec.hidden_size, {self._names.lm_head: spec.vocab_size})
        matrix = empty_matrix(spec.hidden_size, spec.vocab_size, self._dtype)
        return matrix.copy_(embedding.t())

    def _layer(self, index: int) -> LayerWeights:
        names, hidden = self._names, self._spec.hidden_size
        prefix = names.layer.format(layer=index)
        return LayerWeights(
            attention=self._attention(prefix, names.attention),
            mlp_norm=self._norm(prefix + names.mlp_norm, hidden),
            mlp=self._experts(prefix) if self._spec.layers[index].has_experts else self._dense(prefix, names.dense),
            mlp_post_norm=self._optional_norm(prefix, names.mlp_post_norm, hidden),
        )

    def _attention(self, prefix: str, names: AttentionNames) -> AttentionWeights:
        spec = self._spec
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        biases = {names.q_bias: q, names.k_bias: kv, names.v_bias: kv}
        return AttentionWeights(
            norm=self._norm(prefix + names.norm, spec.hidden_size),
            qkv=self._matrix(spec.hidden_size, {prefix + names.q: q, prefix + names.k: kv, prefix + names.v: kv}),
            qkv_bias=self._bias({prefix + name: size for name, size in biases.items() if name is not None}),
            q_norm=self._optional_norm(prefix, names.q_norm, spec.head_dim),
            k_norm=self._optional_norm(prefix, names.k_norm, spec.head_dim),
            output=self._matrix(q, {prefix + names.output: spec.hidden_size}),
            post_norm=self._optional_norm(prefix, names.post_norm, spec.hidden_size),
        )

    def _dense(self, prefix: str, names: DenseNames, size: int | None = None) -> DenseWeights:
        hidden, size = self._spec.hidden_size, size or self._spec.intermediate_size
        return DenseWeights(
            gate_up=self._matrix(hidden, {prefix + names.gate: size, prefix + names.up: size}),
            down=self._matrix(size, {prefix + names.down: hidden}),
        )

    def _experts(self, prefix: str) -> ExpertsWeights:
        experts, names, router = self._spec.experts, self._names.expert, self._names.router
        assert experts is not None
        assert names is not None
        assert router is not None
        return ExpertsWeights(
            router=self._matrix(self._spec.hidden_size, {prefix + router: experts.num_experts}),
            experts=tuple(
                self._dense(prefix, _numbered(names, expert), experts.intermediate_size)
                for expert in range(experts.num_experts)
            ),
        )

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        value = self._source.read(name)
        if tuple(value.shape) != shape:
            found = f"tensor {name} has shape {tuple(value.shape)}, expected {shape}"
            raise ModelLoadError(f"{self._source.origin}: {found}")
        return value

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self._tensor(name, size).to(torch.float32) + self._spec.norm_offset

    def _optional_norm(self, prefix: str, name: str | None, size: int) -> torch.Tensor | None:
        return None if name is None else self._norm(prefix + name, size)

    def _bias(self, parts: Mapping[str, int]) -> torch.Tensor | None:
        """Parts one after another, each given as name and its size."""
        if not parts:
            return None
        return torch.cat([self._tensor(name, size).to(self._dtype) for name, size in parts.items()])

    def _matrix(self, num_in: int, parts: Mapping[str, int]) -> torch.Tensor:
        """Parts side by side as `[in, sum of outs]`, each given as name and its number of outputs."""
        matrix = empty_matrix(num_in, sum(parts.values()), self._dtype)
        start = 0
        for name, size in parts.items():
            matrix[:, start : start + size] = self._tensor(name, size, num_in).t()
            start += size
        return matrix


def _numbered(names: DenseNames, expert: int) -> DenseNames:
    return DenseNames(
        gate=names.gate.format(expert=expert), up=names.up.format(expert=expert), down=names.down.format(expert=expert)
    )
