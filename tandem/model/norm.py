"""Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467), and the residual stream's addition after one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.model.linear import Matrix, project, project_add
from tandem.model.native import kernels
from tandem.model.native.rows import rms_norm_rows

Sum = Callable[[torch.Tensor], None]
"""Sums a tensor over the ranks that hold the other parts of the same layers, in place."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension of `x`; `weight` fp32 of that size; computes in fp32, returns the dtype of `x`."""
    own = kernels()
    if own is not None and x.is_cpu and x.dtype == torch.float32 and x.dim() == 2 and x.is_contiguous():
        return rms_norm_rows(own, x, weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """How half a layer's result comes back into the residual stream."""

    eps: float
    post_norm: torch.Tensor | None = None
    """`[H]` of a norm before the addition, where a family has one."""
    sum_over_ranks: Sum | None = None
    """Where other ranks compute the rest."""

    def add_projected(self, residual: torch.Tensor, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """`residual` `[n, H]` plus `x` `[n, in]` times `matrix` `[in, H]`; of both, this rank has some inputs."""
        if self.post_norm is None and self.sum_over_ranks is None:
            return project_add(residual, x, matrix)
        return self.add(residual, project(x, matrix))

    def add(self, residual: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """`residual` plus the sum of all ranks' `part` `[n, H]`, which is overwritten."""
        if self.sum_over_ranks is not None:
            self.sum_over_ranks(part)
        return residual + (part if self.post_norm is None else rms_norm(part, self.post_norm, self.eps))
