"""An HTTP server inside a running event loop: uvicorn without its signal handlers, on a socket bound beforehand."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

import uvicorn

from tandem.errors import ClusterError
from tandem.rpc.server import format_address
from tandem.tasks import cancel_all


class HttpServer:
    """A running server. Made by `start_http`."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, *, host: str, port: int) -> None:
        self._server = server
        self._listener = listener
        self._loop_task = asyncio.create_task(server.main_loop(), name="http server")
        self._stopping: asyncio.Task[None] | None = None
        self.port = port
        self.address = format_address(host, port)
        self.url = f"{'https' if server.config.ssl else 'http'}://{self.address}"

    async def stop(self, grace_s: float) -> None:
        """Refuses new connections, lets answers under way end for `grace_s` seconds, then cancels them. Idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        await cancel_all([self._loop_task])  # told to exit it would look up a tenth of a second later
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        await self._server.shutdown(sockets=[self._listener])


async def start_http(app: Any, host: str, *, port: int, tls: ssl.SSLContext | None = None) -> HttpServer:
    """Serves an ASGI application on host:port; 0 takes a free port. Raises ClusterError when it cannot be bound."""
    listener = _bind(host, port)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", http="httptools")
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    try:
        await server.startup(sockets=[listener])
    except BaseException:
        listener.close()
        raise
    return HttpServer(server, listener, host=host, port=listener.getsockname()[1])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise ClusterError(f"cannot listen on {host}:{port}: {exc.strerror}", param="http_port") from exc
    return listener
