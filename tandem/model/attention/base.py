"""The seam to attention kernels: a plan built once per batch and kind of layer, then one call per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.model.batch import FlatBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """In what layers may differ. A score is `scale` times query times key, c tanh(score / c) for a softcap c."""

    scale: float
    window: int | None = None
    """Newest tokens that a token attends to, itself among them; None: all."""
    softcap: float | None = None


class AttentionPlan(Protocol):
    """Everything about one batch that does not depend on the layer: indices, masks, split into kinds of work."""

    def attend(self, query: torch.Tensor, layer: torch.Tensor, output: torch.Tensor) -> None:
        """Causal attention of the batch's tokens to their own contexts.

        `query` `[num_tokens, num_heads, head_dim]`, rotated; `layer` is the cache's tensor of this layer, in which
        the batch's own K and V are written already; the result goes to `output`, shaped like `query`, contiguous.
        """


class AttentionBackend(Protocol):
    """A way to compute attention over the paged cache."""

    def plan(self, batch: FlatBatch, options: AttentionOptions) -> AttentionPlan:
        """Prepares one batch for the layers with these options."""
