"""Brings blocks from the store's memory into the cache while an iteration computes: layer n+1 loads while n computes.

One thread copies, layer after layer, for all prompts of an iteration; the engine waits for a layer before it needs it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kv.block_copies import BlockCopies
from tandem.prefix_store.holdings import Loan
from tandem.types import BlockId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Some blocks of one prompt. `slots[i]` of the loan's memory goes to `blocks[i]`."""

    loan: Loan
    slots: tuple[int, ...]
    blocks: tuple[BlockId, ...]


class LayerLoads:
    """The loads of one iteration; begins at once. `wait` is the executor's `before_layer`."""

    def __init__(self, copies: BlockCopies, loads: Sequence[Load]) -> None:
        self.seconds = 0.0
        """What all copies took together, once the last layer has come."""
        self.waited_s = 0.0
        """What the engine waited for them."""
        self._copies = copies
        self._loads = loads
        self._arrived = threading.Condition()
        self._num_layers = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="layer-loads", daemon=True)
        self._thread.start()

    def wait(self, layer: int) -> None:
        """Returns when the layer is in the cache. Raises what copying raised: a bug of ours."""
        with self._arrived:
            if self._num_layers <= layer and self._error is None:
                started_s = time.monotonic()
                self._arrived.wait_for(lambda: self._num_layers > layer or self._error is not None)
                self.waited_s += time.monotonic() - started_s
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        started_s = time.monotonic()
        try:
            for layer in range(self._copies.num_layers):
                for load in self._loads:
                    self._copies.load_layer(layer, load.loan.memory, slots=load.slots, blocks=load.blocks)
                with self._arrived:
                    if layer == self._copies.num_layers - 1:
                        self.seconds = time.monotonic() - started_s
                    self._num_layers = layer + 1
                    self._arrived.notify_all()
        except Exception as exc:  # raised again on the engine's thread
            logger.exception("KV could not be copied from the store's memory")
            with self._arrived:
                self._error = exc
                self._arrived.notify_all()
