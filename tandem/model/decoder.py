"""The forward pass of every family over one flat batch: prefill chunks and decode tokens are the same to it.

In what families differ is in the spec and in the layers' parts (`self_attention.py`, `mlp.py`). Owns no blocks and
samples nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch

from tandem.kv.cache import KvCache
from tandem.model.attention.base import AttentionBackend, AttentionOptions, AttentionPlan
from tandem.model.attention.native import NativeAttention
from tandem.model.batch import FlatBatch
from tandem.model.executor import LayerHook
from tandem.model.fused_layers import FusedLayers, can_fuse
from tandem.model.linear import project_in
from tandem.model.mlp import make_feed_forward
from tandem.model.native import kernels
from tandem.model.native.room import Room
from tandem.model.norm import rms_norm
from tandem.model.self_attention import SelfAttention
from tandem.model.spec import ModelSpec
from tandem.model.weights import Weights


class TensorStage(Protocol):
    """The ranks that hold the other parts of the same layers."""

    @property
    def first_token_id(self) -> int:
        """Of the vocabulary that is this rank's."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sums `x` over the ranks, in place."""


class Decoder:
    """One rank's weights bound to its KV cache and one way to compute attention; `spec` has this rank's numbers.

    With `stage`, other ranks hold the rest of each layer, and sums over them complete it: two in each layer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        cache: KvCache,
        backend: AttentionBackend,
        *,
        stage: TensorStage | None = None,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._backend = backend
        self._stage = stage
        total = None if stage is None else stage.all_reduce
        self._attentions = [
            SelfAttention(spec, layer, part.attention, cached, sum_over_ranks=total)
            for layer, part, cached in zip(spec.layers, weights.layers, cache.layers, strict=True)
        ]
        self._feed_forwards = [make_feed_forward(spec, part, total) for part in weights.layers]
        self._fused = _fused(spec, weights, cache, backend) if stage is None else None
        self._logits = Room()
        self._kinds = {attention.options for attention in self._attentions}

    def forward(
        self,
        batch: FlatBatch,
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
        x: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs all layers here: what they make of each token, `[num_tokens, hidden]`.

        `x`, contiguous, is what the layers before made of them, and is overwritten; without it, tokens are embedded.
        """
        x = self._embed(batch.token_ids) if x is None else x
        if self._fused is not None:
            return self._fused.run(x, batch, on_layer, before_layer)
        plans = {options: self._backend.plan(batch, options) for options in self._kinds}
        return self._run(x, batch, plans, on_layer=on_layer, before_layer=before_layer)

    @property
    def kinds(self) -> frozenset[AttentionOptions]:
        """In what the layers here differ: each kind has a plan of its own."""
        return frozenset(self._kinds)

    def run_planned(self, batch: FlatBatch, plans: Mapping[AttentionOptions, AttentionPlan]) -> torch.Tensor:
        """The same from token ids on, with attention planned already for each of `kinds`."""
        return self._run(self._embed(batch.token_ids), batch, plans)

    def _run(
        self,
        x: torch.Tensor,
        batch: FlatBatch,
        plans: Mapping[AttentionOptions, AttentionPlan],
        *,
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        for index, (attention, mlp) in enumerate(zip(self._attentions, self._feed_forwards, strict=True)):
            if before_layer is not None:
                before_layer(index)
            on_written = None if on_layer is None else partial(on_layer, index)
            x = attention.add_to(x, batch, plans[attention.options], on_written)
            x = mlp.add_to(x)
        return x

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden]`; each rank has some ids' rows, and the sum has all."""
        if self._stage is None:
            return self._weights.embedding.index_select(0, token_ids)
        own = token_ids - self._stage.first_token_id
        elsewhere = (own < 0) | (own >= len(self._weights.embedding))
        x = self._weights.embedding.index_select(0, own.masked_fill(elsewhere, 0))
        x.masked_fill_(elsewhere.unsqueeze(1), 0)
        self._stage.all_reduce(x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits after given rows of what `forward` returned, `[num_rows, hidden]`: `[num_rows, vocab]` fp32.

        Of the vocabulary that is this rank's. The next call overwrites them.
        """
        if not len(hidden):
            return torch.empty(0, self._weights.lm_head.shape[1], device=hidden.device)
        rows = rms_norm(hidden, self._weights.final_norm, self._spec.rms_norm_eps)
        logits = project_in(self._logits, rows, self._weights.lm_head)
        cap = self._spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _fused(spec: ModelSpec, weights: Weights, cache: KvCache, backend: AttentionBackend) -> FusedLayers | None:
    own = kernels()
    if own is None or not isinstance(backend, NativeAttention) or not can_fuse(weights, cache):
        return None
    return FusedLayers(own, spec, weights, cache=cache, attention=backend)
