"""Matrix products as the model uses them, and the memory order in which each precision multiplies fastest on a CPU.

Matrices are `[in, out]` to their users. fp32 is stored so too, which streams in order even for one row, with rows
padded by a cache line: a row length of a multiple of 4 KiB would put all rows into the same cache sets. bf16, and all
on a GPU, is stored output-major, the order that oneDNN, torch's one-row kernel and cuBLAS want. Our own kernels have an
order of theirs (`native/packed.py`), but for bf16 on processors that multiply it: there oneDNN is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

from tandem.model.device_io import HOST
from tandem.model.native import kernels
from tandem.model.native.packed import PackedMatrix
from tandem.model.native.room import Room
from tandem.model.spec import Activation

Matrix = torch.Tensor | PackedMatrix

_PAD_BYTES = 64


@cache
def _has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices faster than it would widen them first."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def empty_matrix(num_in: int, num_out: int, dtype: torch.dtype, device: torch.device = HOST) -> torch.Tensor:
    """Uninitialised `[in, out]` in the order that suits `dtype` on `device`."""
    if dtype != torch.float32 or device != HOST:
        return torch.empty(num_out, num_in, dtype=dtype, device=device).t()
    return torch.empty(num_in, num_out + _PAD_BYTES // dtype.itemsize, dtype=dtype)[:, :num_out]


def packed(matrix: torch.Tensor, *, gated: bool = False) -> Matrix:
    """`matrix` `[in, out]` in the order in which this process multiplies fastest. `gated`: for `project_gated`."""
    own = kernels()
    if own is None or not matrix.is_cpu or (matrix.dtype == torch.bfloat16 and _has_fast_bf16()):
        return matrix
    return PackedMatrix(own, matrix, gated=gated)


def _widen(x: torch.Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.bfloat16 and len(x) > 1 and not _has_fast_bf16()


def project_in(room: Room, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """`project`, in fp32; the result may lie in `room`."""
    if isinstance(matrix, PackedMatrix) and x.dtype == torch.float32:
        return matrix.multiply(x, out=room.take(len(x), matrix.shape[1]))
    return project(x, matrix).float()


def project(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` `[n, in]` times `matrix` `[in, out]`, plus `bias` `[out]`, in the dtype of `x`."""
    if isinstance(matrix, PackedMatrix):
        return matrix.multiply(x, bias=bias)
    if bias is not None:
        return project_add(bias, x, matrix)
    return (x.float() @ matrix.float()).to(x.dtype) if _widen(x) else x @ matrix


def project_add(residual: torch.Tensor, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """`residual` `[n, out]` or `[out]` plus `x` times `matrix`, rounded once."""
    if isinstance(matrix, PackedMatrix):
        is_bias = residual.dim() == 1
        return matrix.multiply(x, bias=residual if is_bias else None, residual=None if is_bias else residual)
    if _widen(x):
        return torch.addmm(residual.float(), x.float(), matrix.float()).to(x.dtype)
    return torch.addmm(residual, x, matrix)


def project_gated(x: torch.Tensor, matrix: Matrix, activation: Activation) -> torch.Tensor:
    """Activation of `x` times the first half of `matrix` `[in, 2 out]`, times `x` times the other half: `[n, out]`."""
    if isinstance(matrix, PackedMatrix):
        return matrix.multiply_gated(x, activation)
    gate, up = project(x, matrix).chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate).mul_(up)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x, inplace=True)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}
