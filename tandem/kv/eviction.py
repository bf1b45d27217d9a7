"""Which blocks of a tier make room: by recency, or by recency and frequency together. Pure.

A policy turns each use of a block into a priority; who has the lowest goes first. `prefix_directory.py` sees to it that
a parent never goes before its children. Its clock counts turnovers, not seconds: how often the tier could have been
filled with what was put into it. So one setting fits any size and any load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from tandem.types import BlockHash


class EvictionPolicy(Protocol):
    """Priorities of one tier's blocks."""

    def used(self, name: BlockHash, *, before: float | None, now: float) -> float:
        """The priority of a block that is used at `now` (turnovers); `before` is its last one, None for a new block."""


@dataclass(frozen=True, slots=True)
class Lru:
    """Least recently used first."""

    def used(self, name: BlockHash, *, before: float | None, now: float) -> float:
        """Its last use alone."""
        return now


@dataclass(frozen=True, slots=True)
class Lrfu:
    """Every use counts, and counts half after each half-life (Lee et al., LRFU, 2001).

    The decayed count is kept as a logarithm that grows with the clock, so that priorities of different times compare
    without being brought up to date: log2(sum of 2**(t/h) over the uses at t).
    """

    half_life: float = 0.5
    """Turnovers. Chosen by replaying a production trace: `benchmarks/eviction.py`."""

    def used(self, name: BlockHash, *, before: float | None, now: float) -> float:
        """log2(2**before + 2**(now/h))."""
        newest = now / self.half_life
        if before is None:
            return newest
        high, low = max(before, newest), min(before, newest)
        return high + math.log2(1.0 + 2.0 ** (low - high))
