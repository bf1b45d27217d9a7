"""Matrix products as the model uses them, and the memory order in which each precision multiplies fastest on a CPU.

Matrices are `[in, out]` to their users. fp32 is stored so too, which streams in order even for one row, with rows
padded by a cache line: a row length of a multiple of 4 KiB would put all rows into the same cache sets. bf16 is
stored output-major, the order that oneDNN and torch's one-row kernel want.
"""

from __future__ import annotations

from functools import cache

import torch

_PAD_BYTES = 64


@cache
def _has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices faster than it would widen them first."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def empty_matrix(num_in: int, num_out: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised `[in, out]` in the order that suits `dtype`."""
    if dtype != torch.float32:
        return torch.empty(num_out, num_in, dtype=dtype).t()
    return torch.empty(num_in, num_out + _PAD_BYTES // dtype.itemsize, dtype=dtype)[:, :num_out]


def _widen(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and len(x) > 1 and not _has_fast_bf16()


def project(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` `[n, in]` times `matrix` `[in, out]`, plus `bias` `[out]`, in the dtype of `x`."""
    if bias is not None:
        return project_add(bias, x, matrix)
    return (x.float() @ matrix.float()).to(x.dtype) if _widen(x) else x @ matrix


def project_add(residual: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`residual` `[n, out]` or `[out]` plus `x` times `matrix`, rounded once."""
    if _widen(x):
        return torch.addmm(residual.float(), x.float(), matrix.float()).to(x.dtype)
    return torch.addmm(residual, x, matrix)
