"""Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467), and the residual stream's addition after one."""

from __future__ import annotations

import torch

from tandem.model.linear import project, project_add


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension of `x`; `weight` fp32 of that size; computes in fp32, returns the dtype of `x`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype)


def add_projected(
    residual: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, post_norm: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`residual` `[n, H]` plus `x` `[n, in]` times `matrix` `[in, H]`, which is normed first where a family does so."""
    if post_norm is None:
        return project_add(residual, x, matrix)
    return residual + rms_norm(project(x, matrix), post_norm, eps)
