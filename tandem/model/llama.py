"""The forward pass of the Llama family over one flat batch: prefill chunks and decode tokens are the same to it.

Writes each layer's new K and V into the paged cache, says so, then attends. Owns no blocks and samples nothing.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tandem.kv.cache import KvCache
from tandem.model.attention.base import AttentionBackend, AttentionPlan
from tandem.model.batch import FlatBatch
from tandem.model.executor import LayerHook
from tandem.model.linear import project, project_add
from tandem.model.rope import rotate_in_place
from tandem.model.spec import ModelSpec
from tandem.model.weights import LayerWeights, Weights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) over the last dimension; computes in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype)


class LlamaModel:
    """Weights bound to one KV cache and one way to compute attention."""

    def __init__(self, spec: ModelSpec, weights: Weights, cache: KvCache, attention: AttentionBackend) -> None:
        self._spec = spec
        self._weights = weights
        self._cache = cache
        self._attention = attention
        self._num_query = spec.num_heads * spec.head_dim

    def forward(self, batch: FlatBatch, on_layer: LayerHook | None = None) -> torch.Tensor:
        """Runs all layers: what they make of each token, `[num_tokens, hidden]`."""
        plan = self._attention.plan(batch)
        x = self._weights.embedding.index_select(0, batch.token_ids)
        for index, layer in enumerate(self._weights.layers):
            x = self._attend(x, layer, batch, plan, index, on_layer)
            x = self._feed_forward(x, layer)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits after given rows of what `forward` returned, `[num_rows, hidden]`: `[num_rows, vocab]` fp32."""
        if not len(hidden):
            return torch.empty(0, self._spec.vocab_size)
        rows = rms_norm(hidden, self._weights.final_norm, self._spec.rms_norm_eps)
        return project(rows, self._weights.lm_head).float()

    def _attend(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        batch: FlatBatch,
        plan: AttentionPlan,
        index: int,
        on_layer: LayerHook | None,
    ) -> torch.Tensor:
        spec, cached = self._spec, self._cache.layers[index]
        qkv = project(rms_norm(x, layer.attention_norm, spec.rms_norm_eps), layer.qkv)
        heads = qkv.view(len(x), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        rotate_in_place(heads[:, : spec.num_heads + spec.num_kv_heads], batch.rotary)
        new = heads[:, spec.num_heads :].reshape(-1, spec.head_dim)
        cached.view(-1, spec.head_dim).index_copy_(0, batch.kv_rows, new)
        if on_layer is not None:
            on_layer(index)
        attended = x.new_empty(len(x), spec.num_heads, spec.head_dim)
        plan.attend(heads[:, : spec.num_heads], cached, attended)
        return project_add(x, attended.view(len(x), self._num_query), layer.output)

    def _feed_forward(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        gate_up = project(rms_norm(x, layer.mlp_norm, self._spec.rms_norm_eps), layer.gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return project_add(x, functional.silu(gate, inplace=True).mul_(up), layer.down)
