"""The forward pass of every family over one flat batch: prefill chunks and decode tokens are the same to it.

In what families differ is in the spec and in the layers' parts (`self_attention.py`, `mlp.py`). Owns no blocks and
samples nothing.
"""

from __future__ import annotations

from functools import partial

import torch

from tandem.kv.cache import KvCache
from tandem.model.attention.base import AttentionBackend
from tandem.model.batch import FlatBatch
from tandem.model.executor import LayerHook
from tandem.model.linear import project
from tandem.model.mlp import make_feed_forward
from tandem.model.norm import rms_norm
from tandem.model.self_attention import SelfAttention
from tandem.model.spec import ModelSpec
from tandem.model.weights import Weights


class Decoder:
    """Weights bound to one KV cache and one way to compute attention."""

    def __init__(self, spec: ModelSpec, weights: Weights, cache: KvCache, backend: AttentionBackend) -> None:
        self._spec = spec
        self._weights = weights
        self._backend = backend
        self._attentions = [
            SelfAttention(spec, layer, part.attention, cached)
            for layer, part, cached in zip(spec.layers, weights.layers, cache.layers, strict=True)
        ]
        self._feed_forwards = [make_feed_forward(spec, part) for part in weights.layers]
        self._kinds = {attention.options for attention in self._attentions}

    def forward(
        self, batch: FlatBatch, on_layer: LayerHook | None = None, before_layer: LayerHook | None = None
    ) -> torch.Tensor:
        """Runs all layers: what they make of each token, `[num_tokens, hidden]`."""
        plans = {options: self._backend.plan(batch, options) for options in self._kinds}
        x = self._weights.embedding.index_select(0, batch.token_ids)
        for index, (attention, mlp) in enumerate(zip(self._attentions, self._feed_forwards, strict=True)):
            if before_layer is not None:
                before_layer(index)
            on_written = None if on_layer is None else partial(on_layer, index)
            x = attention.add_to(x, batch, plans[attention.options], on_written)
            x = mlp.add_to(x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits after given rows of what `forward` returned, `[num_rows, hidden]`: `[num_rows, vocab]` fp32."""
        if not len(hidden):
            return torch.empty(0, self._spec.vocab_size)
        rows = rms_norm(hidden, self._weights.final_norm, self._spec.rms_norm_eps)
        logits = project(rows, self._weights.lm_head).float()
        cap = self._spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
