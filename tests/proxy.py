"""A TCP proxy whose target may change: as a Service that sends new connections to other pods, or as a TLS front."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Proxy:
    """Open connections stay where they are; new ones go to `target` ("host:port")."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self._open: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, target: str, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
        """Listens on a free port of loopback."""
        proxy = cls(target)
        server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0, ssl=tls)
        proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            server.close()
            for task in proxy._open:
                task.cancel()
            await asyncio.gather(*proxy._open, return_exceptions=True)
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        host, _, port = self.target.rpartition(":")
        try:
            inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
            try:
                await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
            finally:
                inner_writer.close()
        except (OSError, asyncio.CancelledError):
            return  # refused, or the test is over
        finally:
            self._open.discard(task)
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
