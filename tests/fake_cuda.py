"""What is asked of `torch.cuda`, noted in order, while the work itself is done on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class NotedStream:
    def __init__(self, cuda: NotedCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def synchronize(self) -> None:
        self.cuda.calls.append(f"wait for {self.name}")

    def wait_event(self, event: NotedEvent) -> None:
        self.cuda.calls.append(f"{self.name} waits for {event.name}")


class NotedEvent:
    def __init__(self, cuda: NotedCuda) -> None:
        self.cuda, self.name = cuda, "an event on nothing"

    def record(self, stream: NotedStream) -> None:
        self.name = f"what {stream.name} had"

    def synchronize(self) -> None:
        self.cuda.calls.append(f"wait for {self.name}")


class NotedCuda:
    """`calls` in order; pinned memory is plain memory, noted by its size."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.allocated: list[int] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def Event(self) -> NotedEvent:
        return NotedEvent(self)

    def current_stream(self, device: torch.device) -> NotedStream:
        return NotedStream(self, "compute")

    default_stream = current_stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: NotedStream) -> Iterator[None]:
        self.calls.append(f"begin on {stream.name}")
        yield
        self.calls.append(f"end on {stream.name}")
