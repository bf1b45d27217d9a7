"""What a client receives, and the bounded buffer between a request's tokens and a client that may read slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from router.tool_parser import ToolCallDelta, joined_calls
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
    stop_reason: str | int | None = None
    """The stop string or the client's own stop token that ended the choice."""
    usage: inference_pb2.Usage | None = None
    timings: inference_pb2.RequestTimings | None = None


def merged(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Steps of one choice, in order and at least one, as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return OutputDelta(
        choice=last.choice,
        text="".join(delta.text for delta in deltas),
        tool_calls=tuple(joined_calls(chain.from_iterable(delta.tool_calls for delta in deltas))),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        timings=last.timings,
    )


class OutputBuffer:
    """Steps not yet read, at most `max_tokens` tokens of them. One writer, one reader, one event loop."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._waiting: dict[int, list[OutputDelta]] = {}
        """By choice, the one that waits longest first."""
        self._last: OutputDelta | None = None
        """The very last step, until it is taken."""
        self._error: TandemError | None = None
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, delta: OutputDelta) -> None:
        """Appends a step; one with usage is the last. Raises Overloaded when the reader is too far behind."""
        self._num_tokens += len(delta.token_ids)
        if self._num_tokens > self._max_tokens:
            raise Overloaded(f"client reads too slowly: more than {self._max_tokens} tokens wait for it")
        if delta.usage is not None:
            self._last, self._ended = delta, True
        else:
            self._waiting.setdefault(delta.choice, []).append(delta)
        self._changed.set()

    def fail(self, error: TandemError) -> None:
        """The reader gets `error` next; steps not yet read are dropped. The first error counts."""
        if self._error is None and not self._ended:
            self._error = error
            self._waiting.clear()
            self._changed.set()

    async def get(self) -> OutputDelta | None:
        """All unread steps of one choice as one; None after the last. Raises the error that ended the output."""
        while not self._waiting and self._last is None:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._take()

    def _take(self) -> OutputDelta:
        """Of the choice that waits longest. The very last step stays behind what waits of other choices."""
        choice = next(iter(self._waiting), None)
        deltas = [] if choice is None else self._waiting.pop(choice)
        if self._last is not None and not self._waiting and choice in (None, self._last.choice):
            deltas.append(self._last)
            self._last = None
        taken = merged(deltas)
        self._num_tokens -= len(taken.token_ids)
        return taken
