"""The kernels that work on rows of fp32: norms, and heads on their way into the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.model.native import Kernels
from tandem.model.rope import RotaryTables


def rms_norm_rows(kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `norm.rms_norm`, for contiguous fp32 `x` `[n, size]`."""
    out = torch.empty_like(x)
    num_rows, size = x.shape
    kernels.rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), num_rows, size, eps, torch.get_num_threads()
    )
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """What queries and keys are normed by, each `[head_dim]` fp32 or nothing."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float


def place_heads(
    kernels: Kernels,
    heads: torch.Tensor,
    norms: HeadNorms,
    *,
    tables: RotaryTables | None,
    cached: torch.Tensor,
    kv_rows: torch.Tensor,
) -> None:
    """Norms and rotates queries and keys of `heads` `[n, num_heads + 2 num_kv_heads, head_dim]` in place.

    Writes keys and values to the rows `kv_rows` of `cached`, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
    """
    num_tokens, num_all, head_dim = heads.shape
    num_kv_heads = cached.shape[2]
    kernels.place(
        heads.data_ptr(),
        0 if tables is None else tables.cos.data_ptr(),
        0 if tables is None else tables.sin.data_ptr(),
        0 if norms.q_norm is None else norms.q_norm.data_ptr(),
        0 if norms.k_norm is None else norms.k_norm.data_ptr(),
        cached.data_ptr(),
        kv_rows.data_ptr(),
        num_tokens,
        num_all - 2 * num_kv_heads,
        num_kv_heads,
        head_dim,
        norms.eps,
        torch.get_num_threads(),
    )
