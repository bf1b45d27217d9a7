"""Rotary position embedding (Su et al., arXiv:2104.09864) in the rotate-half form, with the scalings of `spec.py`.

Owns the frequencies and the per-batch tables; nothing about how heads are laid out in memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tandem.model.spec import LinearScaling, Llama3Scaling, RopeSpec, YarnScaling


class RotaryTables(NamedTuple):
    """For each token of a batch; fp32 `[num_tokens, 1, head_dim]`. `sin` carries the sign of the rotated half."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryFrequencies(NamedTuple):
    """One kind of positions. `inverse` `[head_dim / 2]` fp32 is radians per position, `scale` that of both tables."""

    inverse: torch.Tensor
    scale: float = 1.0

    def to(self, device: torch.device) -> RotaryFrequencies:
        """The same on a device."""
        return RotaryFrequencies(self.inverse.to(device), self.scale)


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> RotaryFrequencies:
    """What a spec says, as numbers."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.scaling:
        case None:
            return RotaryFrequencies(plain)
        case LinearScaling(factor=factor):
            return RotaryFrequencies(plain / factor)
        case Llama3Scaling() as scaling:
            return RotaryFrequencies(_llama3(plain, scaling))
        case YarnScaling() as scaling:
            return RotaryFrequencies(_yarn(plain, rope.theta, scaling), scaling.attention_factor)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Stretches long wavelengths as Llama 3.1 does, with a linear ramp between the two bounds."""
    turns = scaling.original_context_tokens * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def _yarn(frequencies: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Keeps dimensions of many turns per original context, divides those of few, with a linear ramp between."""
    num_pairs = len(frequencies)

    def pair_of(turns: float) -> float:
        """The (fractional) pair of dimensions that makes so many turns in the original context."""
        return num_pairs * math.log(scaling.original_context_tokens / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first or 0.001
    divided = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - divided) + frequencies / scaling.factor * divided


def rotary_tables(positions: torch.Tensor, frequencies: RotaryFrequencies) -> RotaryTables:
    """Tables for token `positions` `[num_tokens]`."""
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies.inverse
    cos, sin = angles.cos(), angles.sin()
    if frequencies.scale != 1.0:
        cos, sin = cos * frequencies.scale, sin * frequencies.scale
    return RotaryTables(torch.cat([cos, cos], 1).unsqueeze(1), torch.cat([-sin, sin], 1).unsqueeze(1))


def rotate_in_place(heads: torch.Tensor, tables: RotaryTables) -> None:
    """Rotates `heads` `[num_tokens, num_heads, head_dim]`, any strides; computes in fp32."""
    half = heads.shape[-1] // 2
    swapped = torch.cat([heads[..., half:], heads[..., :half]], -1)
    if heads.dtype == torch.float32:
        heads.mul_(tables.cos).addcmul_(swapped, tables.sin)
    else:
        heads.copy_(heads.float().mul_(tables.cos).addcmul_(swapped.float(), tables.sin))
