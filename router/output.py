"""What a client receives, and the bounded buffer between a request's tokens and a client that may read slowly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tandem.errors import Overloaded, TandemError
from tandem.rpc.tandem.v1 import inference_pb2
from tandem.types import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputDelta:
    """One step of an output. The last one has finish_reason, usage and timings.

    `text` is what became certain with this step: it may be empty while a character or a stop string is incomplete.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: inference_pb2.Usage | None = None
    timings: inference_pb2.RequestTimings | None = None

    def then(self, later: OutputDelta) -> OutputDelta:
        """The two as one step."""
        return OutputDelta(
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            finish_reason=later.finish_reason,
            usage=later.usage,
            timings=later.timings,
        )


class OutputBuffer:
    """Steps not yet read, at most `max_tokens` tokens of them. One writer, one reader, one event loop."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._deltas: list[OutputDelta] = []
        self._error: TandemError | None = None
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, delta: OutputDelta) -> None:
        """Appends a step; one with a finish_reason is the last. Raises Overloaded when the reader is too far behind."""
        self._num_tokens += len(delta.token_ids)
        if self._num_tokens > self._max_tokens:
            raise Overloaded(f"client reads too slowly: more than {self._max_tokens} tokens wait for it")
        self._deltas.append(delta)
        self._ended = delta.finish_reason is not None
        self._changed.set()

    def fail(self, error: TandemError) -> None:
        """The reader gets `error` next; steps not yet read are dropped. The first error counts."""
        if self._error is None and not self._ended:
            self._error = error
            self._deltas.clear()
            self._changed.set()

    async def get(self) -> OutputDelta | None:
        """All unread steps as one; None after the last. Raises the error that ended the output."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._take()

    def _take(self) -> OutputDelta:
        first, *rest = self._deltas
        self._deltas.clear()
        self._num_tokens = 0
        for delta in rest:
            first = first.then(delta)
        return first
