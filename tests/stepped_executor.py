"""A real executor that a test can stop before an iteration, or break: for tests of what happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tandem.kv.cache import KvCache
from tandem.model.executor import Executor, LayerHook, SequenceSlice, SliceOutput
from tandem.model.grammar import GrammarCompiler
from tandem.model.spec import ModelSpec
from tandem.types import BlockId


class SteppedExecutor:
    """An `Executor` around a real one."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._open = threading.Event()
        self._open.set()
        self.stopped = threading.Event()
        """Set while the engine's thread stands before an iteration."""
        self.failure: Exception | None = None
        """What the next iteration raises."""
        self.swapped_out: list[tuple[BlockId, ...]] = []
        self.swapped_in: list[tuple[BlockId, ...]] = []
        """Blocks that went to host memory and came back, call by call."""

    @property
    def spec(self) -> ModelSpec:
        return self._inner.spec

    @property
    def cache(self) -> KvCache:
        return self._inner.cache

    @property
    def grammars(self) -> GrammarCompiler:
        return self._inner.grammars

    def stop(self) -> None:
        """The next iteration waits for `go`."""
        self._open.clear()

    def go(self) -> None:
        """Lets iterations run."""
        self._open.set()

    def step(self) -> None:
        """Lets the iteration that is stopped run, and stops the next one."""
        self._open.set()
        self._open.clear()

    def execute(
        self,
        batch: Sequence[SequenceSlice],
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> list[SliceOutput]:
        if not self._open.is_set():
            self.stopped.set()
            self._open.wait()
            self.stopped.clear()
        if self.failure is not None:
            raise self.failure
        return self._inner.execute(batch, on_layer, before_layer)


    def copy_blocks(self, sources: Sequence[BlockId], destinations: Sequence[BlockId]) -> None:
        self._inner.copy_blocks(sources, destinations)

    def open_swap(self, num_slots: int) -> None:
        self._inner.open_swap(num_slots)

    def swap_out(self, blocks: Sequence[BlockId], slots: Sequence[BlockId]) -> None:
        self.swapped_out.append(tuple(blocks))
        self._inner.swap_out(blocks, slots)

    def swap_in(self, slots: Sequence[BlockId], blocks: Sequence[BlockId]) -> None:
        self.swapped_in.append(tuple(blocks))
        self._inner.swap_in(slots, blocks)
