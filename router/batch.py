"""The prompts of one HTTP request: a bounded number of their outputs is under way at once, the rest waits its turn.

So a request of many prompts stands beside others and not before them, and ends soon after its client has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import TracebackType
from typing import Self

from router.output import OutputDelta
from router.prepared import PreparedRequest
from router.stream import OutputStream


class PromptBatch:
    """An async context manager: leaving it ends what runs, all at once. What waits is left to its owner.

    Read it once, by `deltas`. At least one prompt is under way, whatever `max_outputs` is.
    """

    def __init__(self, prepared: Sequence[PreparedRequest], *, max_outputs: int) -> None:
        """At least one, each with as many choices as the others."""
        self._prepared = prepared
        self._num_lanes = min(len(prepared), max(1, max_outputs // prepared[0].request.num_choices))
        self._steps: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue(maxsize=1)
        """One waits to be read: more stay in each stream's own buffer, which is bounded. None: a lane has ended."""
        self._lanes: list[asyncio.Task[None]] = []
        self.streams: dict[int, OutputStream] = {}
        """Those that were started, by their prompt's index."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)

    async def deltas(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """(Index of the prompt, step) in the order in which they come. Raises the first error of any prompt."""
        waiting = iter(range(len(self._prepared)))
        self._lanes = [asyncio.create_task(self._run_lane(waiting)) for _ in range(self._num_lanes)]
        num_running = len(self._lanes)
        while num_running:
            step = await self._steps.get()
            if isinstance(step, Exception):
                raise step
            if step is None:
                num_running -= 1
            else:
                yield step

    async def _run_lane(self, waiting: Iterator[int]) -> None:
        """One prompt after another, until none waits. Whatever goes wrong is the reader's to raise."""
        try:
            for index in waiting:
                async with self._prepared[index].start() as stream:
                    self.streams[index] = stream
                    async for delta in stream:
                        await self._steps.put((index, delta))
        except Exception as exc:
            await self._steps.put(exc)
        else:
            await self._steps.put(None)
