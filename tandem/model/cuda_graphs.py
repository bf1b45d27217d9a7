"""Decode as captured CUDA graphs: a ladder of batch sizes, each captured once and replayed with new inputs.

Owns which size a batch is padded to and when a graph is captured; what one iteration does is the caller's. Not wired to
the executor and never run on a GPU; the ladder is tested with a recorder in place of CUDA.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

NUM_WARM_UPS = 2
"""Runs before a capture, so that lazily made handles and workspaces are there."""


class Graph(Protocol):
    """`torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Runs what was captured."""


class Capturer(Protocol):
    """How graphs are made; `torch.cuda` in life."""

    def new(self) -> Graph:
        """An empty graph."""

    def capture(self, graph: Graph) -> AbstractContextManager[None]:
        """Records what is launched within."""


class CudaCapturer:
    """torch's own."""

    def new(self) -> Graph:
        """See `Capturer.new`."""
        return torch.cuda.CUDAGraph()

    def capture(self, graph: Graph) -> AbstractContextManager[None]:
        """See `Capturer.capture`."""
        assert isinstance(graph, torch.cuda.CUDAGraph)
        return torch.cuda.graph(graph)


def ladder(largest: int) -> tuple[int, ...]:
    """Sizes to capture: 1, 2, 4, then multiples of 8, up to and with `largest`; padding stays below 8 rows."""
    return tuple(sorted({size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest} | {largest}))


def rung(sizes: Sequence[int], num_sequences: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_sequences`; None when none does."""
    index = bisect_left(sizes, num_sequences)
    return sizes[index] if index < len(sizes) else None


class GraphLadder:
    """One graph for each size that has been asked for. `run(size)` reads inputs of that size where they always are."""

    def __init__(self, run: Callable[[int], None], sizes: Sequence[int], capturer: Capturer) -> None:
        self._run = run
        self._sizes = tuple(sorted(sizes))
        self._capturer = capturer
        self._graphs: dict[int, Graph] = {}

    def replay(self, num_sequences: int) -> int | None:
        """Runs the iteration padded to a rung, capturing it when it is new; the rung, None when the batch is too large.

        The caller has put inputs in place and padded them (`page_table.padded_decode`).
        """
        size = rung(self._sizes, num_sequences)
        if size is None:
            return None
        if size not in self._graphs:
            self._graphs[size] = self._captured(size)
        self._graphs[size].replay()
        return size

    def _captured(self, size: int) -> Graph:
        for _ in range(NUM_WARM_UPS):
            self._run(size)
        graph = self._capturer.new()
        with self._capturer.capture(graph):
            self._run(size)
        return graph
