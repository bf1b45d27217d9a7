"""A rank other than 0: runs what rank 0 says, in that order, and ends when rank 0 does.

Frames are read on a thread of their own; what is computed is queued for one compute thread. What concerns handoffs is
passed on as it comes (`HandoffPart`), which puts into the queue what must wait for the batches before it.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Protocol

from tandem.errors import TransportError
from tandem.kv.swap_memory import SwapMemory
from tandem.model.executor import LayerHook
from tandem.model.stage import Stage
from tandem.ranks.batch_wire import unpack_batch, unpack_copies, unpack_count
from tandem.ranks.channel import Kind, RankChannel

logger = logging.getLogger(__name__)


Enqueue = Callable[[Callable[[], None]], None]
"""Puts a job behind all that rank 0 said before."""


class HandoffPart(Protocol):
    """What a rank does about handoffs of its worker."""

    def on_frame(self, payload: bytes) -> None:
        """Rank 0 said something; on the thread that reads."""

    def layer_hook(self) -> LayerHook | None:
        """Of the batch that runs next: called with each layer's number on this rank. On the compute thread."""

    def close(self) -> None:
        """Ends what is left and frees all memory."""


class Follower:
    """`run` is the compute thread. `on_lost` is called on another thread, as soon as rank 0 is gone."""

    def __init__(self, stage: Stage, channel: RankChannel, *, on_lost: Callable[[TransportError], None]) -> None:
        self._stage = stage
        self._swap = SwapMemory(stage.cache, 0)
        self._channel = channel
        self._on_lost = on_lost
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._part: HandoffPart | None = None

    def enqueue(self, job: Callable[[], None]) -> None:
        """Runs `job` on the compute thread after all that was said before. Any thread."""
        self._queue.put(job)

    def run(self, part: HandoffPart | None) -> None:
        """Until rank 0 says stop, or is gone. Raises what computing raises: then this rank is of no more use."""
        self._part = part
        reader = self._channel.follow(self._on_frame, self._on_end, name="rank-0")
        try:
            while (job := self._queue.get()) is not None:
                job()
        finally:
            self._channel.close()
            reader.join()
            if part is not None:
                part.close()
            if self._stage.collectives is not None:
                self._stage.collectives.close()

    def _on_frame(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.HANDOFF and self._part is not None:
            self._part.on_frame(payload)
        elif kind is Kind.BATCH:
            self._queue.put(lambda: self._run_batch(payload))
        elif kind is Kind.COPY:
            self._queue.put(lambda: self._stage.cache.copy_blocks(*unpack_copies(payload)))
        elif kind in (Kind.SWAP_ROOM, Kind.SWAP_OUT, Kind.SWAP_IN):
            self._queue.put(lambda: self._run_swap(kind, payload))
        elif kind is Kind.STOP:
            self._queue.put(None)
        else:
            raise TransportError(f"rank 0 sent a frame of kind {kind.name} that is not for this rank")

    def _on_end(self, error: TransportError) -> None:
        self._on_lost(error)
        self._queue.put(None)

    def _run_batch(self, payload: bytes) -> None:
        hook = None if self._part is None else self._part.layer_hook()
        for _ in self._stage.run(unpack_batch(payload), hook):
            pass

    def _run_swap(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.SWAP_ROOM:
            self._swap = SwapMemory(self._stage.cache, unpack_count(payload))
        elif kind is Kind.SWAP_OUT:
            self._swap.copy_out(*unpack_copies(payload))
            self._channel.send(Kind.DONE)
        else:
            self._swap.copy_in(*unpack_copies(payload))
