"""The prefill side of one handoff's control stream: the call, what goes out in order, and the pulse of the lease.

Carries messages and time to a `StreamOwner`; knows nothing of blocks or states.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from grpc import aio

from tandem.errors import TandemError
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    _Call = aio.StreamStreamCall[worker_pb2.SourceMessage, worker_pb2.DestinationMessage]

STREAM_END_TIMEOUT_S = 2.0
"""How long an ended handoff waits for the peer to close the control stream."""
_TICK_S = 0.25


class StreamOwner(Protocol):
    """Whose stream it is. Called on the event loop."""

    @property
    def beat_s(self) -> float:
        """How often to renew."""

    async def on_message(self, message: worker_pb2.DestinationMessage) -> None:
        """The peer said something."""

    def on_end(self, error: TandemError | None) -> None:
        """The peer will say nothing more: it closed the stream, or it was lost (error)."""

    def on_tick(self, now: float, *, renew: bool) -> None:
        """Time has passed."""


class SourceControl:
    """One stream. `put` may be called from any thread, the rest on the event loop that made it."""

    def __init__(self, owner: StreamOwner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[worker_pb2.SourceMessage | None] = asyncio.Queue()
        self._over = asyncio.Event()

    def put(self, message: worker_pb2.SourceMessage) -> None:
        """Sends a message, after those before it."""
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    def finish(self) -> None:
        """The handoff has ended: what was put is still sent, then the stream is closed. Any thread."""
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, None)
        self._loop.call_soon_threadsafe(self._over.set)

    async def run(self, stub: worker_pb2_grpc.DecodeWorkerAsyncStub) -> None:
        """Holds the stream until `finish`. Raises nothing: failures go to the owner."""
        call = stub.Handoff()
        writer = asyncio.create_task(self._write(call))
        reader = asyncio.create_task(self._read(call))
        try:
            await self._pulse()
            await asyncio.wait({reader}, timeout=STREAM_END_TIMEOUT_S)
        finally:
            writer.cancel()
            reader.cancel()
            call.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)

    async def _read(self, call: _Call) -> None:
        error: TandemError | None = None
        try:
            async for message in call:
                await self._owner.on_message(message)
        except aio.AioRpcError as exc:
            error = from_rpc_error(exc)
        self._owner.on_end(error)

    async def _write(self, call: _Call) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same broken stream and reports it

    async def _pulse(self) -> None:
        """Renews the lease and lets the owner see time pass until the handoff has ended."""
        renewed_s = time.monotonic()
        while not self._over.is_set():
            beat_s = self._owner.beat_s
            try:
                async with asyncio.timeout(min(beat_s, _TICK_S)):
                    await self._over.wait()
            except TimeoutError:
                pass
            now = time.monotonic()
            renew = now - renewed_s >= beat_s
            renewed_s = now if renew else renewed_s
            self._owner.on_tick(now, renew=renew)
