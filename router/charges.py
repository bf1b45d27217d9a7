"""What one router has given to one worker, and how that adds up with what the worker reports. Pure.

A report is up to a heartbeat old, and counts this router's own requests too. So the part of it that is other
routers' is what exceeds the most that this router had there lately; its own part is known exactly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

NUM_WINDOWS = 4
"""How many periods between two `roll` calls count as lately."""


@dataclass(kw_only=True, slots=True)
class Charge:
    """Prompt tokens, blocks and requests given and not seen to end."""

    num_tokens: int = 0
    num_blocks: int = 0
    num_requests: int = 0
    num_cached_tokens: int = 0
    num_held_blocks: int = 0
    """What the requests need beyond that and find there: a worker may report it as theirs."""
    _peaks: deque[tuple[int, int]] = field(default_factory=lambda: deque([(0, 0)], maxlen=NUM_WINDOWS))

    def add(
        self,
        *,
        num_tokens: int,
        num_blocks: int,
        num_requests: int,
        num_cached_tokens: int = 0,
        num_held_blocks: int = 0,
    ) -> None:
        """Books a difference."""
        self.num_tokens += num_tokens
        self.num_blocks += num_blocks
        self.num_requests += num_requests
        self.num_cached_tokens += num_cached_tokens
        self.num_held_blocks += num_held_blocks
        self._peaks[-1] = (max(self._peaks[-1][0], self._most[0]), max(self._peaks[-1][1], self._most[1]))

    @property
    def _most(self) -> tuple[int, int]:
        """Tokens and blocks that the worker may report of what it was given."""
        return self.num_tokens + self.num_cached_tokens, self.num_blocks + self.num_held_blocks

    def roll(self) -> None:
        """A period is over."""
        self._peaks.append(self._most)

    def total_tokens(self, reported: int) -> int:
        """Prompt tokens before the worker, its report included."""
        return self.num_tokens + max(0, reported - max(tokens for tokens, _ in self._peaks))

    def total_blocks(self, reported: int) -> int:
        """Blocks used or asked for on the worker, its report included."""
        return self.num_blocks + max(0, reported - max(blocks for _, blocks in self._peaks))
