"""Matrices in the order in which the kernels read them, and products with them."""

from __future__ import annotations

import mmap

import torch

from tandem.model.native import Kernels
from tandem.model.spec import Activation

_HUGE_PAGE_BYTES = 2 << 20
ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}
"""As the kernels number them."""


class PackedMatrix:
    """`[in, out]` as panels: all rows of a few columns, one after another. fp32 or bf16; sums are fp32.

    A `gated` matrix is a gate and what it is multiplied by side by side; a panel has some columns of both.
    """

    def __init__(self, kernels: Kernels, matrix: torch.Tensor, *, gated: bool = False) -> None:
        self.shape = torch.Size(matrix.shape)
        self.dtype = matrix.dtype
        self.gated = gated
        self._kernels = kernels
        num_in, num_out = self.shape
        width = kernels.VECTOR_WIDTH
        num_panels = -(-(num_out // 2) // width) if gated else -(-num_out // (2 * width))
        self._data = _allocated(num_panels * num_in * 2 * width, matrix.dtype)
        strides, is_bf16 = matrix.stride(), matrix.dtype == torch.bfloat16
        kernels.pack(matrix.data_ptr(), *strides, self._data.data_ptr(), num_in, num_out, is_bf16, gated)

    @property
    def address(self) -> int:
        """Where the panels begin."""
        return self._data.data_ptr()

    def numel(self) -> int:
        """Numbers in it, padding left out."""
        return self.shape[0] * self.shape[1]

    def element_size(self) -> int:
        """Bytes of one."""
        return self.dtype.itemsize

    def multiply(
        self,
        x: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x` `[n, in]` times this, plus `bias` `[out]` and `residual` `[n, out]`, rounded once to the dtype of `x`.

        The sums are put in `out`, contiguous fp32 `[n, out]`, where it is given.
        """
        assert not self.gated
        return self._run(x, self.shape[1], bias=bias, residual=residual, out=out)

    def multiply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Activation of `x` `[n, in]` times the first half, times `x` times the second half: `[n, out / 2]`."""
        assert self.gated
        return self._run(x, self.shape[1] // 2, activation=activation)

    def _run(
        self,
        x: torch.Tensor,
        width: int,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: Activation | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = _rows(x)
        added = None if residual is None else _rows(residual).contiguous()
        if out is None:
            out = torch.empty(len(x), width)
        wide_bias = None if bias is None else bias.float()
        self._kernels.matmul(
            rows.data_ptr(),
            rows.stride(0),
            self._data.data_ptr(),
            0 if wide_bias is None else wide_bias.data_ptr(),
            0 if added is None else added.data_ptr(),
            out.data_ptr(),
            len(x),
            *self.shape,
            self.dtype == torch.bfloat16,
            ACTIVATIONS[activation],
            torch.get_num_threads(),
        )
        return out if x.dtype == torch.float32 else out.to(x.dtype)


def _allocated(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised; in huge pages where the kernel has them, because each iteration reads all of it."""
    num_bytes = count * dtype.itemsize
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """fp32, each row's numbers side by side."""
    wide = x.float()
    return wide if wide.stride(-1) == 1 else wide.contiguous()
