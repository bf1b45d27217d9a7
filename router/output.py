"""What a client receives, and the bounded buffer between a request's tokens and a client that may read slowly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.tool_parser import ToolCallDelta
from tandem.errors import Overloaded, TandemError
from tandem.rpc.tandem.v1 import inference_pb2
from tandem.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputDelta:
    """One step of one choice. A choice's last one has finish_reason; the very last one has usage and timings too.

    `text` is what became certain with this step: it may be empty while a character or a stop string is incomplete.
    With tools, `text` is what is no call. `logprobs` has an entry for each token, where they were asked for.
    """

    choice: int = 0
    text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    usage: inference_pb2.Usage | None = None
    timings: inference_pb2.RequestTimings | None = None

    def then(self, later: OutputDelta) -> OutputDelta:
        """Two steps of one choice as one."""
        return OutputDelta(
            choice=self.choice,
            text=self.text + later.text,
            tool_calls=self.tool_calls + later.tool_calls,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
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
        """Appends a step; one with usage is the last. Raises Overloaded when the reader is too far behind."""
        self._num_tokens += len(delta.token_ids)
        if self._num_tokens > self._max_tokens:
            raise Overloaded(f"client reads too slowly: more than {self._max_tokens} tokens wait for it")
        self._deltas.append(delta)
        self._ended = delta.usage is not None
        self._changed.set()

    def fail(self, error: TandemError) -> None:
        """The reader gets `error` next; steps not yet read are dropped. The first error counts."""
        if self._error is None and not self._ended:
            self._error = error
            self._deltas.clear()
            self._changed.set()

    async def get(self) -> OutputDelta | None:
        """All unread steps of one choice as one; None after the last. Raises the error that ended the output."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._take()

    def _take(self) -> OutputDelta:
        """Of the choice that waits longest. The very last step stays behind what waits of other choices."""
        choice = self._deltas[0].choice
        others = [delta for delta in self._deltas if delta.choice != choice]
        first, *rest = (delta for delta in self._deltas if delta.choice == choice)
        if others and rest and rest[-1].usage is not None:
            others.append(rest.pop())
        self._deltas = others
        for delta in rest:
            first = first.then(delta)
        self._num_tokens -= len(first.token_ids)
        return first
