"""Work captured as CUDA graphs, one for each of a ladder of batch sizes, and replayed with new inputs.

Owns when a graph is captured and how; what an iteration does is the caller's (`graphed_decode.py`), which sizes there
are is `decode_inputs.py`'s. Captures have never been run on a GPU; the ladder is tested with recorders in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

NUM_WARM_UPS = 2
"""Runs before a capture, so that lazily made handles and workspaces are there."""


class Graph(Protocol):
    """`torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Runs what was captured."""


class Capturer(Protocol):
    """How graphs are made; `torch.cuda` in life."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Records what `run` launches, without doing it."""


class CudaCapturer:
    """torch's own. All graphs share one pool of memory: they are replayed one after another, on one stream."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._pool = cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Capturer.capture`. What other threads (transfers) ask of the GPU meanwhile does not spoil it."""
        graph: Graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph


class GraphLadder:
    """One graph for each size that has been asked for. `run(size)` reads inputs of that size where they always are."""

    def __init__(self, run: Callable[[int], None], sizes: Sequence[int], capturer: Capturer) -> None:
        self.sizes = tuple(sorted(sizes))
        self._run = run
        self._capturer = capturer
        self._graphs: dict[int, Graph] = {}

    @property
    def num_captured(self) -> int:
        """Graphs so far."""
        return len(self._graphs)

    def replay(self, size: int) -> None:
        """Runs the iteration at one of `sizes`, capturing it when it is new. Inputs and tables are in place."""
        assert size in self.sizes
        if size not in self._graphs:
            self._graphs[size] = self._captured(size)
        self._graphs[size].replay()

    def _captured(self, size: int) -> Graph:
        for _ in range(NUM_WARM_UPS):
            self._run(size)
        return self._capturer.capture(lambda: self._run(size))
