"""Memory that is kept from one iteration to the next: asking the system for it each time costs page faults."""

from __future__ import annotations

import torch


class Room:
    """Grows to the most that was asked for, and stays so. One user at a time; what it gave before is overwritten."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def take(self, *shape: int) -> torch.Tensor:
        """Contiguous fp32 of `shape`, uninitialised."""
        count = torch.Size(shape).numel()
        if count > len(self._numbers):
            self._numbers = torch.empty(count)
        return self._numbers[:count].view(shape)
