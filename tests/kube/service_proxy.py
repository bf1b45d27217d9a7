"""kube-proxy's part: a listener at each cluster address and port, which hands every connection to a ready pod."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field

from tests.kube.services import Backend

_CONNECT_S = 5.0
_PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class _Listener:
    """One port of one Service. `targets` are taken in turn."""

    server: asyncio.Server
    targets: list[tuple[str, int]]
    turn: int = 0
    connections: set[asyncio.Task[None]] = field(default_factory=set)

    def next_target(self) -> tuple[str, int] | None:
        """The pod for the next connection."""
        if not self.targets:
            return None
        self.turn += 1
        return self.targets[self.turn % len(self.targets)]


class ServiceProxy:
    """All listeners, in one thread. A connection stays with its pod for as long as both ends keep it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kube-proxy")
        self._listeners: dict[tuple[str, int], _Listener] = {}

    def start(self) -> None:
        """Begins with nothing to listen on."""
        self._thread.start()

    def update(self, backends: Iterable[Backend]) -> None:
        """Listens for exactly these from now on. Raises OSError when an address cannot be bound."""
        self._call(self._update({(backend.address, backend.port): backend for backend in backends}))

    async def _update(self, wanted: dict[tuple[str, int], Backend]) -> None:
        for place in self._listeners.keys() - wanted.keys():
            await _close(self._listeners.pop(place))
        for place, backend in wanted.items():
            if place not in self._listeners:
                self._listeners[place] = await self._listen(place)
            self._listeners[place].targets = list(backend.targets)

    async def _listen(self, place: tuple[str, int]) -> _Listener:
        def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(_serve(self._listeners[place].next_target(), reader, writer))
            listener.connections.add(task)
            task.add_done_callback(listener.connections.discard)

        listener = _Listener(server=await asyncio.start_server(on_connection, *place), targets=[])
        return listener

    def stop(self) -> None:
        """Closes every listener and connection."""
        self._call(self._update({}))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _close(listener: _Listener) -> None:
    listener.server.close()
    connections = list(listener.connections)
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
    await listener.server.wait_closed()


async def _serve(
    target: tuple[str, int] | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Both directions of one connection, until both have ended."""
    try:
        if target is None:
            return  # as a Service without endpoints: the connection is refused
        async with asyncio.timeout(_CONNECT_S):
            far_reader, far_writer = await asyncio.open_connection(*target)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            far_writer.close()
    except (OSError, TimeoutError):
        writer.transport.abort()  # the client sees what the pod's end would have shown it
    finally:
        writer.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE_BYTES):
        sink.write(piece)
        await sink.drain()
    with contextlib.suppress(OSError):
        sink.write_eof()


