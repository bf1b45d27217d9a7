"""The gated MLP and the mixture of experts, each as it stands in the residual stream."""

from __future__ import annotations

from typing import Protocol

import torch

from tandem.model.linear import project, project_gated
from tandem.model.norm import Joining, Sum, rms_norm
from tandem.model.spec import ExpertsSpec, ModelSpec
from tandem.model.weights import DenseWeights, ExpertsWeights, LayerWeights


class FeedForward(Protocol):
    """The second half of a layer."""

    def add_to(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[num_tokens, hidden]` plus what the layer's MLP makes of it."""


def make_feed_forward(spec: ModelSpec, layer: LayerWeights, sum_over_ranks: Sum | None = None) -> FeedForward:
    """The kind that the layer has weights for."""
    if isinstance(layer.mlp, DenseWeights):
        return DenseMlp(spec, layer, layer.mlp, sum_over_ranks)
    return ExpertsMlp(spec, layer, layer.mlp, sum_over_ranks)


class DenseMlp:
    """Down of (activation of gate, times up)."""

    def __init__(
        self, spec: ModelSpec, layer: LayerWeights, weights: DenseWeights, sum_over_ranks: Sum | None = None
    ) -> None:
        self._eps = spec.rms_norm_eps
        self._activation = spec.activation
        self._norm = layer.mlp_norm
        self._joining = Joining(eps=self._eps, post_norm=layer.mlp_post_norm, sum_over_ranks=sum_over_ranks)
        self._weights = weights

    def add_to(self, x: torch.Tensor) -> torch.Tensor:
        """See `FeedForward.add_to`."""
        gated = project_gated(rms_norm(x, self._norm, self._eps), self._weights.gate_up, self._activation)
        return self._joining.add_projected(x, gated, self._weights.down)


class ExpertsMlp:
    """Each token goes to the few experts that the router likes best (Shazeer et al., arXiv:1701.06538).

    With several ranks, each computes for all tokens what its own experts make of them.
    """

    def __init__(
        self, spec: ModelSpec, layer: LayerWeights, weights: ExpertsWeights, sum_over_ranks: Sum | None = None
    ) -> None:
        assert spec.experts is not None
        assert layer.mlp_post_norm is None
        self._eps = spec.rms_norm_eps
        self._activation = spec.activation
        self._norm = layer.mlp_norm
        self._spec = spec.experts
        self._sum_over_ranks = sum_over_ranks
        self._weights = weights
        self._own = range(weights.first, weights.first + len(weights.experts))

    def add_to(self, x: torch.Tensor) -> torch.Tensor:
        """See `FeedForward.add_to`. Groups tokens by expert; what experts give is summed in fp32, in their order."""
        normed = rms_norm(x, self._norm, self._eps)
        shares, chosen = choose_experts(project(normed, self._weights.router), self._spec)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self._spec.num_chosen
        rows, share = normed.index_select(0, tokens), shares.flatten().index_select(0, order).unsqueeze(1)
        total = x.new_zeros(x.shape, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=self._spec.num_experts).tolist()):
            part = slice(start, start + count)
            start += count
            if count and expert in self._own:
                total.index_add_(0, tokens[part], self._run(rows[part], expert).float().mul_(share[part]))
        if self._sum_over_ranks is not None:
            self._sum_over_ranks(total)
        return x + total.to(x.dtype)

    def _run(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        weights = self._weights.experts[expert - self._weights.first]
        return project(project_gated(x, weights.gate_up, self._activation), weights.down)


def choose_experts(logits: torch.Tensor, spec: ExpertsSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """From the router's `[num_tokens, num_experts]`: shares, fp32, and experts, both `[num_tokens, num_chosen]`."""
    shares, chosen = logits.float().softmax(-1).topk(spec.num_chosen, dim=-1)
    return (shares / shares.sum(-1, keepdim=True) if spec.normalised else shares), chosen
