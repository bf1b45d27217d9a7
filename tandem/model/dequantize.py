"""ggml's quantized blocks to fp32: the common 4- and 8-bit kinds in torch, every other kind through the gguf package.

The torch forms give the same bits as gguf's and are several times faster, which is most of a model's load time.
Layouts: ggml-common.h (`block_q4_0`, `block_q4_1`, `block_q8_0`), 32 values per block.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

_Q = gguf.GGMLQuantizationType


def _scales(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The leading `count` fp16 numbers of each block, `[num_blocks, count]` fp32."""
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, scale: torch.Tensor, *, offset: int) -> torch.Tensor:
    """`[num_blocks, 16]` bytes to `[num_blocks, 32]`: low nibbles first, then high ones."""
    values = torch.cat([packed & 15, packed >> 4], dim=1).float()
    return values.sub_(offset).mul_(scale) if offset else values.mul_(scale)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:], _scales(blocks, 1), offset=8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scales = _scales(blocks, 2)
    return _nibbles(blocks[:, 4:], scales[:, :1], offset=0).add_(scales[:, 1:])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_scales(blocks, 1))


_FAST = {_Q.Q4_0: _q4_0, _Q.Q4_1: _q4_1, _Q.Q8_0: _q8_0}


def dequantize(raw: NDArray[np.uint8], quantization: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> torch.Tensor:
    """The bytes of one tensor as fp32 of `shape`, a copy. Raises NotImplementedError for kinds nobody unpacks."""
    block_size, type_size = gguf.GGML_QUANT_SIZES[quantization]
    if quantization in _FAST:
        blocks = torch.from_numpy(raw.reshape(-1, type_size).copy())
        return _FAST[quantization](blocks).view(shape)
    rows = raw.reshape(*shape[:-1], shape[-1] // block_size * type_size)
    return torch.from_numpy(np.array(gguf.dequantize(rows, quantization), dtype=np.float32)).view(shape)
