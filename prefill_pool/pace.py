"""How quickly a prefill worker computes, and how many tokens it takes on so that an iteration ends in time. Pure."""

from __future__ import annotations

import math

_KEPT = 0.5
"""What an iteration counts for when the next one is over."""


class Pace:
    """Seconds per token over the newest iterations, weighted by their tokens: a tiny batch says little."""

    def __init__(self, *, max_iteration_s: float, block_size: int, max_batch_tokens: int) -> None:
        """`max_iteration_s` 0 sets no limit but `max_batch_tokens`."""
        self._max_iteration_s = max_iteration_s
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def token_s(self) -> float:
        """Seconds of one token through all layers; 0 before the first iteration."""
        return self._seconds / self._tokens if self._tokens else 0.0

    @property
    def budget(self) -> int:
        """Tokens of the next iteration."""
        within = tokens_within(self._max_iteration_s, token_s=self.token_s, block_size=self._block_size)
        return self._max_batch_tokens if within is None else min(within, self._max_batch_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """An iteration of `num_tokens` took so long."""
        self._tokens = _KEPT * self._tokens + num_tokens
        self._seconds = _KEPT * self._seconds + seconds


def tokens_within(max_s: float, *, token_s: float, block_size: int) -> int | None:
    """Tokens that are computed within `max_s`, though at least a block; None without a limit or a measurement."""
    if not max_s or not token_s:
        return None
    return max(block_size, math.floor(max_s / token_s))
