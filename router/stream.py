"""One open request at the router: pumps the tokens of all its choices, as text, into one bounded buffer.

Owns the request's end: whatever happens (finish, error, deadline, cancel, a reader that goes away or is too slow),
the dispatch is finished or aborted exactly once, and `on_closed` is told the outcome.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from router.choice_text import ChoiceText
from router.dispatch import Dispatch, DispatchResult
from router.output import OutputBuffer, OutputDelta
from router.timing import TokenClock
from tandem.errors import DeadlineExceeded, RequestCancelled, TandemError
from tandem.observability.metrics import OK
from tandem.rpc.tandem.v1 import inference_pb2
from tandem.types import PromptScores, Request, TokenLogprobs, TokenStep

_LOG = logging.getLogger(__name__)


class OutputStream:
    """Iterates over the output's steps. Use it as an async context manager: leaving it stops the request.

    Raises the TandemError that ended the request.
    """

    def __init__(
        self,
        request: Request,
        dispatch: Dispatch,
        *,
        texts: Sequence[ChoiceText],
        clock: TokenClock,
        max_buffered_tokens: int,
        on_closed: Callable[[OutputStream], None],
    ) -> None:
        """Starts at once; `request.deadline_s` is on the clock of `time.monotonic`. One of `texts` for each choice."""
        self.request = request
        self.clock = clock
        self.outcome: str | None = None
        """OK or the error's code; None while the request runs."""
        self.usage: inference_pb2.Usage | None = None
        """Known when the output ended normally."""
        self.timings: inference_pb2.RequestTimings | None = None
        """Likewise."""
        self._dispatch = dispatch
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """One for each prompt token after the first; known before the first delta, where they were asked for."""
        self._texts = dict(enumerate(texts))
        """Of choices that go on."""
        self._buffer = OutputBuffer(max_tokens=max_buffered_tokens)
        self._on_closed = on_closed
        self._pump = asyncio.create_task(self._run(), name=f"output {request.request_id}")
        self._closing: asyncio.Task[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputDelta:
        delta = await self._buffer.get()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops the request if it still runs. Returns when both legs were told. Idempotent."""
        self._start_closing()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def cancel(self, error: TandemError) -> None:
        """Ends the request: its reader gets `error`, also when it is not reading now."""
        self._fail(error)
        self._start_closing()

    def _start_closing(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close {self.request.request_id}")

    async def _close(self) -> None:
        """Cancels the pump (no-op after its end) and aborts unless the request ended normally."""
        try:
            self._pump.cancel()
            await asyncio.wait([self._pump])
            if self.outcome != OK:
                self._fail(RequestCancelled("the client ended the request"))
                await self._dispatch.abort()
        finally:
            self._on_closed(self)

    def _fail(self, error: TandemError) -> None:
        if self.outcome is None:
            self.outcome = error.code
            self._buffer.fail(error)

    async def _run(self) -> None:
        """The pump. Ends the output with a last step or an error; an error stops the workers at once."""
        try:
            last = await self._read_until_deadline()
            self._end(last, await self._dispatch.finish())
        except TandemError as exc:
            self._fail(exc)
        except Exception as exc:
            _LOG.exception("request %s failed in the router", self.request.request_id)
            self._fail(TandemError(f"internal error ({type(exc).__name__})"))
        finally:
            if self.outcome != OK:
                await self._dispatch.abort()

    async def _read_until_deadline(self) -> OutputDelta:
        try:
            async with asyncio.timeout(self.request.deadline_s - time.monotonic()) as scope:
                return await self._read()
        except TimeoutError as exc:
            if not scope.expired():
                raise
            limit_s = self.request.deadline_s - self.request.arrival_s
            raise DeadlineExceeded(
                f"the request took longer than {limit_s:g} s; its tokens so far: {self.clock.num_tokens}"
            ) from exc

    async def _read(self) -> OutputDelta:
        """Until the last choice ends: its last delta, which waits for usage and timings."""
        async for step in self._dispatch:
            if isinstance(step, PromptScores):
                self.prompt_logprobs = step.logprobs
                continue
            if step.choice not in self._texts:
                continue  # was on its way when the choice's text ended
            self.clock.tick(time.monotonic(), choice=step.choice)
            last = self._accept(step)
            if last is not None:
                return last
            await asyncio.sleep(0)  # the reader's turn, also when many tokens are here already
        raise TandemError("the token stream ended without a finish reason")

    def _accept(self, step: TokenStep) -> OutputDelta | None:
        """Books one token and hands on the text that is now certain. The delta with which the last choice ends."""
        text = self._texts[step.choice]
        delta = text.accept(step)
        if delta.finish_reason is not None:
            del self._texts[step.choice]
            if not self._texts:
                self._buffer.put(replace(delta, finish_reason=None, stop_reason=None))
                return OutputDelta(
                    choice=step.choice, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
                )
            if text.was_stopped and step.finish_reason is None:
                self._dispatch.stop(step.choice)
        self._buffer.put(delta)
        return None

    def _end(self, last: OutputDelta, result: DispatchResult) -> None:
        self.usage = inference_pb2.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=self.clock.num_tokens,
            cached_tokens=result.prefill.num_cached_tokens if result.prefill is not None else 0,
        )
        self.timings = self.clock.timings(result)
        self._buffer.put(replace(last, usage=self.usage, timings=self.timings))
        self.outcome = OK
