"""The seam to attention kernels: a plan built once per batch, then one call per layer."""

from __future__ import annotations

from typing import Protocol

import torch

from tandem.model.batch import FlatBatch


class AttentionPlan(Protocol):
    """Everything about one batch that does not depend on the layer: indices, masks, split into kinds of work."""

    def attend(self, query: torch.Tensor, layer: torch.Tensor, output: torch.Tensor) -> None:
        """Causal attention of the batch's tokens to their own contexts.

        `query` `[num_tokens, num_heads, head_dim]`, rotated; `layer` is the cache's tensor of this layer, in which
        the batch's own K and V are written already; the result goes to `output`, shaped like `query`, contiguous.
        """


class AttentionBackend(Protocol):
    """A way to compute attention over the paged cache."""

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """Prepares one batch."""
