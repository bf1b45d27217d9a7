"""Several output streams as one, in the order in which their steps come. Reads each only as fast as it is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from router.output import OutputDelta


async def fan_in(streams: Sequence[AsyncIterator[OutputDelta]]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Yields (index of the stream, step) until all have ended. Raises the first error of any. Close it when done."""
    waiting = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                delta = task.result()
                if delta is not None:
                    waiting[asyncio.ensure_future(_next(streams[index]))] = index
                    yield index, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: AsyncIterator[OutputDelta]) -> OutputDelta | None:
    return await anext(stream, None)
