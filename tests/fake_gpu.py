"""A GPU that has shapes, types and a device but computes nothing: torch's fake tensors, on any machine.

An operation that mixes them with tensors of the host raises, as it would on a GPU. The device is "meta", because torch
built for CPUs alone does not slice tensors on "cuda".
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

T = TypeVar("T")
DEVICE = torch.device("meta")


class FakeGpu:
    """Implements `DeviceIo`. What comes to the host is zeros."""

    device = DEVICE

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.num_put = 0
        self.num_finished = 0

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Shaped, typed and laid out like `tensor`."""
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)

    def current(self) -> nullcontext[None]:
        return nullcontext()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu"
        self.num_put += 1
        return self.empty(tensor)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == DEVICE
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def finish(self) -> None:
        self.num_finished += 1


def moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tree of dataclasses and tuples with each tensor moved."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: moved(getattr(value, field.name), move) for field in fields(value)})
    if isinstance(value, tuple):
        parts = [moved(part, move) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
