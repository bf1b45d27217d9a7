"""A place among the running requests of a router, from the first check to the last token: where a request is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from router.stream import OutputStream
from tandem.errors import TandemError
from tandem.tasks import raise_if_cancelled

T = TypeVar("T")


class Slot:
    """`stream` is set once the request is sent to workers."""

    def __init__(self) -> None:
        self.stream: OutputStream | None = None
        self.ended_by: TandemError | None = None
        self._preparing: asyncio.Task[Any] | None = None

    async def prepare(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless the request is ended first: then this raises what ended it."""
        task = asyncio.create_task(work)
        self._preparing = task
        try:
            return await task
        except asyncio.CancelledError:
            raise_if_cancelled()
            assert self.ended_by is not None
            raise self.ended_by from None

    def end(self, error: TandemError) -> None:
        """Ends the request, whatever it is doing; its front gets `error`."""
        self.ended_by = error
        if self.stream is not None:
            self.stream.cancel(error)
        elif self._preparing is not None:
            self._preparing.cancel()
