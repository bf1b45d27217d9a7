"""GET /metrics on a port of its own, for processes that serve no other HTTP; inside the caller's event loop.

Answers one request per connection. Knows nothing of what is exported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tandem.errors import ClusterError
from tandem.rpc.server import format_address

logger = logging.getLogger(__name__)

Collect = Callable[[], Awaitable[CollectorRegistry]]

_REQUEST_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 16_384
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}


class MetricsServer:
    """A running server. `collect` is asked for what to show with each request; `url` is dialable.

    Made by `serve_metrics` and `serve_collected`.
    """

    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.port = 0
        self.url = ""

    async def start(self, host: str, port: int) -> None:
        """Binds. Raises OSError."""
        self._server = await asyncio.start_server(self._answer, host, port, limit=_MAX_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{format_address(host, self.port)}/metrics"

    async def stop(self) -> None:
        """Closes the port and every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
            for writer in self._open.values():
                writer.transport.abort()
            await asyncio.gather(*self._open)
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                writer.write(await _response(self._collect, await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(_message(400, b"the request's head is too long\n"))
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as exc:
            logger.debug("a scraper went away: %r", exc)
        finally:
            del self._open[task]
            writer.close()


async def serve_metrics(registry: CollectorRegistry, host: str, *, port: int = 0) -> MetricsServer:
    """Serves `registry` on host:port; 0 takes a free port. Raises ClusterError when it cannot be bound.

    Collectors are called in the running event loop.
    """

    async def collect() -> CollectorRegistry:
        return registry

    return await serve_collected(collect, host, port=port)


async def serve_collected(collect: Collect, host: str, *, port: int = 0) -> MetricsServer:
    """The same for metrics that have to be gathered first. What `collect` raises, the scraper gets as a 500."""
    server = MetricsServer(collect)
    try:
        await server.start(host, port)
    except OSError as exc:
        raise ClusterError(f"cannot serve metrics on {host}:{port}: {exc.strerror}", param="port") from exc
    return server


async def _response(collect: Collect, head: bytes) -> bytes:
    line, _, rest = head.decode("latin-1").partition("\r\n")
    words = line.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _message(400, b"not an HTTP/1.x request\n")
    method, target, _ = words
    if target.partition("?")[0] != "/metrics":
        return _message(404, b"only /metrics is here\n")
    if method not in ("GET", "HEAD"):
        return _message(405, b"only GET\n", {"Allow": "GET, HEAD"})
    encode, content_type = choose_encoder(_accepts(rest))
    try:
        body = encode(await collect())
    except Exception:  # a collector failed: the scraper is told, the process goes on
        logger.exception("metrics could not be collected")
        return _message(500, b"a collector failed; see the log\n")
    return _message(200, body, {"Content-Type": content_type}, with_body=method == "GET")


def _accepts(headers: str) -> str:
    for line in headers.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "accept":
            return value.strip()
    return ""


def _message(status: int, body: bytes, headers: Mapping[str, str] | None = None, *, with_body: bool = True) -> bytes:
    fields = {"Content-Type": "text/plain; charset=utf-8", **(headers or {})}
    fields |= {"Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body if with_body else b"")
