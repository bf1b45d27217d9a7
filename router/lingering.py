"""How a router leaves without losing a request: for a while it serves on, unready, and lets its connections end.

Clients that keep connections open would send to it until the last moment. HTTP answers tell them to close; gRPC
connections are ended in order, by their age, at all times: so after the while the clients are at other routers.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def age_options(linger_s: float) -> tuple[tuple[str, int], ...]:
    """Server options: a connection that is opened in the first third of the time is gone at its end."""
    if linger_s <= 0:
        return ()
    return (("grpc.max_connection_age_ms", max(1, round(linger_s * 1000 / 2))),)


class ClosingLayer:
    """An ASGI layer; once `closing` is set, each answer is the last one of its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def send_last(message: Message) -> None:
            if self.closing and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_last)
