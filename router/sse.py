"""HTTP plumbing: server-sent events that stop with their client, work that stops with its client, bounded bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.errors import InvalidRequest, RequestCancelled

MAX_BODY_BYTES = 64 * 1024 * 1024
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def event(body: Any) -> bytes:
    """One event with a JSON body."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def read_body(request: HttpRequest) -> bytes:
    """The whole body. Raises InvalidRequest above MAX_BODY_BYTES, RequestCancelled when the client goes."""
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestCancelled("the client went away")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequest(f"the body must be at most {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return bytes(body)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it, and raises RequestCancelled once it has unwound, when the client goes."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise RequestCancelled("the client went away")
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Sends events as they come. The generator is always closed: at its end, on a disconnect, on cancellation."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, headers: dict[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        async with aclosing(self._events):
            try:
                await until_disconnect(receive, self._send(send))
            except RequestCancelled:
                return  # nobody is left to tell

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
