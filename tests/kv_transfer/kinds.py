"""The transports that the conformance suite goes through, each with what it goes over or where its memory is."""

from __future__ import annotations

import pytest
import torch

ON_HOST = ("shm", "ucx", "ucx over posix", "ucx over tcp", "collective", "auto")
"""UCX takes cma where it is left to choose, pushes large payloads through posix, and handles errors over TCP alone."""
ON_GPUS = [pytest.param(f"{name} on GPUs", marks=pytest.mark.gpu) for name in ("ucx", "collective", "auto")]


def fill(memory: torch.Tensor) -> torch.Tensor:
    return memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
