"""Rotary position embedding (Su et al., arXiv:2104.09864) in the rotate-half form, with Llama 3's scaling.

Owns the frequencies and the per-batch tables; nothing about how heads are laid out in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class RotaryTables(NamedTuple):
    """For each token of a batch; fp32 `[num_tokens, 1, head_dim]`. `sin` carries the sign of the rotated half."""

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """`[head_dim / 2]` fp32: radians per position."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def llama3_scaled(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Stretches long wavelengths as Llama 3.1 does, with a linear ramp between the two bounds. Raises KeyError."""
    factor, context = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = context * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / factor)


def rotary_tables(positions: torch.Tensor, frequencies: torch.Tensor) -> RotaryTables:
    """Tables for token `positions` `[num_tokens]`."""
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return RotaryTables(torch.cat([cos, cos], 1).unsqueeze(1), torch.cat([-sin, sin], 1).unsqueeze(1))


def rotate_in_place(heads: torch.Tensor, tables: RotaryTables) -> None:
    """Rotates `heads` `[num_tokens, num_heads, head_dim]`, any strides; computes in fp32."""
    half = heads.shape[-1] // 2
    swapped = torch.cat([heads[..., half:], heads[..., :half]], -1)
    if heads.dtype == torch.float32:
        heads.mul_(tables.cos).addcmul_(swapped, tables.sin)
    else:
        heads.copy_(heads.float().mul_(tables.cos).addcmul_(swapped.float(), tables.sin))
