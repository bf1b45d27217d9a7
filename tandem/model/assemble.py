"""From tensors as a checkpoint names them to `Weights`: checked against the spec, cut for a rank, and fused.

Owns which tensors join and how, and which part of them a rank needs; what they are called is in `tensor_names.py`, how
they are read is the loaders'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.errors import ModelLoadError
from tandem.model.device_io import HOST
from tandem.model.linear import Matrix, empty_matrix, packed
from tandem.model.parallel import ModelShard
from tandem.model.rope import RotaryFrequencies
from tandem.model.tensor_names import AttentionNames, DenseNames, TensorNames
from tandem.model.weights import AttentionWeights, DenseWeights, ExpertsWeights, LayerWeights, Weights


class Reader(Protocol):
    """Gives tensors, or parts of them, by name."""

    def __call__(
        self, name: str, shape: tuple[int, ...], *, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """`rows` and `columns` of a tensor `[out, in]` or `[out]`; what is left out is whole, what is not asked for is
        not read. Raises ModelLoadError when there is no such tensor, or when the whole of it has another `shape`.
        """


def check_shape(origin: object, name: str, found: Sequence[int], expected: tuple[int, ...]) -> None:
    """Raises ModelLoadError for another shape than the one expected."""
    if tuple(found) != expected:
        raise ModelLoadError(f"{origin}: tensor {name} has shape {tuple(found)}, expected {expected}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """Where tensors come from."""

    read: Reader
    names: TensorNames


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """`rows` of a matrix that has `size` outputs."""

    size: int
    rows: range


class Assembler:
    """Reads, checks, cuts and fuses."""

    def __init__(
        self, shard: ModelShard, source: TensorSource, dtype: torch.dtype, *, device: torch.device = HOST
    ) -> None:
        self._shard = shard
        self._spec = shard.spec
        self._read = source.read
        self._names = source.names
        self._dtype = dtype
        self._device = device

    def weights(self, frequencies: tuple[RotaryFrequencies, ...]) -> Weights:
        """All that the rank needs. Raises ModelLoadError, naming origin and tensor."""
        spec, names, shard = self._spec, self._names, self._shard
        embedding = self._embedding() if shard.is_first or (shard.is_last and spec.tie_word_embeddings) else None
        nothing = torch.empty(0, spec.hidden_size, dtype=self._dtype, device=self._device)
        return Weights(
            embedding=self._scaled(embedding) if embedding is not None and shard.is_first else nothing,
            layers=tuple(self._layer(index) for index in shard.layers),
            final_norm=self._norm(names.final_norm, spec.hidden_size) if shard.is_last else torch.empty(0),
            lm_head=self._lm_head(embedding) if shard.is_last else nothing.t(),
            frequencies=tuple(each.to(self._device) for each in frequencies),
        )

    def _embedding(self) -> torch.Tensor:
        """As it is stored, of the token ids that are this rank's."""
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return self._read(self._names.embedding, shape, rows=self._shard.vocabulary).to(self._device, self._dtype)

    def _scaled(self, embedding: torch.Tensor) -> torch.Tensor:
        """In the weights' own precision, as the families that scale do it."""
        if self._spec.embedding_scale == 1.0:
            return embedding
        return embedding * torch.tensor(self._spec.embedding_scale).to(self._dtype)

    def _lm_head(self, embedding: torch.Tensor | None) -> Matrix:
        hidden, rows = self._spec.hidden_size, self._shard.vocabulary
        if not self._spec.tie_word_embeddings:
            return self._matrix(hidden, {self._names.lm_head: _Part(size=self._spec.vocab_size, rows=rows)})
        assert embedding is not None
        return packed(self._empty(hidden, len(rows)).copy_(embedding.t()))

    def _layer(self, index: int) -> LayerWeights:
        names, hidden = self._names, self._spec.hidden_size
        prefix = names.layer.format(layer=index)
        has_experts = self._spec.layers[index].has_experts
        return LayerWeights(
            attention=self._attention(prefix, names.attention),
            mlp_norm=self._norm(prefix + names.mlp_norm, hidden),
            mlp=self._experts(prefix) if has_experts else self._dense(prefix, names.dense),
            mlp_post_norm=self._optional_norm(prefix, names.mlp_post_norm, hidden),
        )

    def _attention(self, prefix: str, names: AttentionNames) -> AttentionWeights:
        spec, shard, width = self._spec, self._shard, self._spec.head_dim
        q = _Part(size=spec.num_heads * width, rows=shard.cut(spec.num_heads * width))
        heads = range(shard.kv_heads.start * width, shard.kv_heads.stop * width)
        kv = _Part(size=spec.num_kv_heads * width, rows=heads)
        biases = {names.q_bias: q, names.k_bias: kv, names.v_bias: kv}
        return AttentionWeights(
            norm=self._norm(prefix + names.norm, spec.hidden_size),
            qkv=self._matrix(spec.hidden_size, {prefix + names.q: q, prefix + names.k: kv, prefix + names.v: kv}),
            qkv_bias=self._bias({prefix + name: part for name, part in biases.items() if name is not None}),
            q_norm=self._optional_norm(prefix, names.q_norm, width),
            k_norm=self._optional_norm(prefix, names.k_norm, width),
            output=self._joining(prefix + names.output, q.size, q.rows),
            post_norm=self._optional_norm(prefix, names.post_norm, spec.hidden_size),
        )

    def _dense(self, prefix: str, names: DenseNames) -> DenseWeights:
        """Of the dense MLP, the channels that are this rank's."""
        return self._gated(prefix, names, self._spec.intermediate_size, self._shard.cut(self._spec.intermediate_size))

    def _gated(self, prefix: str, names: DenseNames, size: int, channels: range) -> DenseWeights:
        part = _Part(size=size, rows=channels)
        return DenseWeights(
            gate_up=self._matrix(
                self._spec.hidden_size, {prefix + names.gate: part, prefix + names.up: part}, gated=True
            ),
            down=self._joining(prefix + names.down, size, channels),
        )

    def _experts(self, prefix: str) -> ExpertsWeights:
        """The whole router, and those experts that are this rank's."""
        experts, names, router = self._spec.experts, self._names.expert, self._names.router
        assert experts is not None
        assert names is not None
        assert router is not None
        size, count = experts.intermediate_size, experts.num_experts
        return ExpertsWeights(
            router=self._matrix(self._spec.hidden_size, {prefix + router: _Part(size=count, rows=range(count))}),
            experts=tuple(
                self._gated(prefix, _numbered(names, expert), size, range(size)) for expert in self._shard.experts
            ),
            first=self._shard.experts.start,
        )

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self._read(name, (size,)).to(self._device, torch.float32) + self._spec.norm_offset

    def _optional_norm(self, prefix: str, name: str | None, size: int) -> torch.Tensor | None:
        return None if name is None else self._norm(prefix + name, size)

    def _bias(self, parts: Mapping[str, _Part]) -> torch.Tensor | None:
        """Parts one after another, by name."""
        if not parts:
            return None
        found = [self._read(name, (part.size,), rows=part.rows) for name, part in parts.items()]
        return torch.cat([bias.to(self._device, self._dtype) for bias in found])

    def _empty(self, num_in: int, num_out: int) -> torch.Tensor:
        return empty_matrix(num_in, num_out, self._dtype, self._device)

    def _matrix(self, num_in: int, parts: Mapping[str, _Part], *, gated: bool = False) -> Matrix:
        """Parts side by side as `[in, sum of rows]`, by name."""
        matrix = self._empty(num_in, sum(len(part.rows) for part in parts.values()))
        start = 0
        for name, part in parts.items():
            rows = self._read(name, (part.size, num_in), rows=part.rows)
            matrix[:, start : start + len(part.rows)] = rows.t()
            start += len(part.rows)
        return packed(matrix, gated=gated)

    def _joining(self, name: str, num_in: int, columns: range) -> Matrix:
        """`[columns, H]`: what brings this rank's part of a layer back into the residual stream."""
        hidden = self._spec.hidden_size
        part = self._read(name, (hidden, num_in), columns=None if len(columns) == num_in else columns)
        return packed(self._empty(len(columns), hidden).copy_(part.t()))


def _numbered(names: DenseNames, expert: int) -> DenseNames:
    return DenseNames(
        gate=names.gate.format(expert=expert), up=names.up.format(expert=expert), down=names.down.format(expert=expert)
    )
