"""One layer's self-attention as it stands in the residual stream: norm, heads, positions, cache, output.

Writes the batch's new K and V into the paged cache and says so before it attends. The kernel is the plan's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.model.attention.base import AttentionOptions, AttentionPlan
from tandem.model.batch import FlatBatch
from tandem.model.linear import project
from tandem.model.native import kernels
from tandem.model.native.rows import HeadNorms, place_heads
from tandem.model.norm import Joining, Sum, rms_norm
from tandem.model.rope import rotate_in_place
from tandem.model.spec import LayerSpec, ModelSpec
from tandem.model.weights import AttentionWeights


class SelfAttention:
    """Weights bound to one layer of the cache, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.

    `spec` has this rank's numbers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerSpec,
        weights: AttentionWeights,
        cached: torch.Tensor,
        *,
        sum_over_ranks: Sum | None = None,
    ) -> None:
        self._spec = spec
        self._rope = layer.rope
        self._weights = weights
        self._cached = cached
        self._joining = Joining(eps=spec.rms_norm_eps, post_norm=weights.post_norm, sum_over_ranks=sum_over_ranks)
        self._norms = HeadNorms(q_norm=weights.q_norm, k_norm=weights.k_norm, eps=spec.rms_norm_eps)
        self.options = AttentionOptions(
            scale=spec.attention_scale, window=layer.window, softcap=spec.attention_softcap
        )

    def add_to(
        self, x: torch.Tensor, batch: FlatBatch, plan: AttentionPlan, on_written: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """`x` `[num_tokens, hidden]` plus what attention makes of it. `plan` is for this batch and `options`."""
        spec, weights = self._spec, self._weights
        qkv = project(rms_norm(x, weights.norm, spec.rms_norm_eps), weights.qkv, weights.qkv_bias)
        heads = qkv.view(len(x), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        self._place(heads, batch)
        if on_written is not None:
            on_written()
        attended = x.new_empty(len(x), spec.num_heads, spec.head_dim)
        plan.attend(heads[:, : spec.num_heads], self._cached, attended)
        return self._joining.add_projected(x, attended.flatten(1), weights.output)

    def _place(self, heads: torch.Tensor, batch: FlatBatch) -> None:
        """Norms and rotates the queries and keys of `heads`, in place; writes keys and values to the cache."""
        tables = None if self._rope is None else batch.rotary[self._rope]
        own = kernels()
        if own is not None and heads.is_cpu and heads.dtype == torch.float32:
            place_heads(own, heads, self._norms, tables=tables, cached=self._cached, kv_rows=batch.kv_rows)
            return
        num_heads, num_rotated = self._spec.num_heads, self._spec.num_heads + self._spec.num_kv_heads
        self._norm(heads[:, :num_heads], self._weights.q_norm)
        self._norm(heads[:, num_heads:num_rotated], self._weights.k_norm)
        if tables is not None:
            rotate_in_place(heads[:, :num_rotated], tables)
        new = heads[:, num_heads:].reshape(-1, self._spec.head_dim)
        self._cached.view(-1, self._spec.head_dim).index_copy_(0, batch.kv_rows, new)

    def _norm(self, heads: torch.Tensor, weight: torch.Tensor | None) -> None:
        if weight is not None:
            heads.copy_(rms_norm(heads, weight, self._spec.rms_norm_eps))
