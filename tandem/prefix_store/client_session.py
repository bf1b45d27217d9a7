"""One attachment of a worker to its node's store: the stream that keeps it, the mapped memory, and what is held.

The connection over which the memory came stays open until nothing of this session is written any more, even after the
stream is gone: the store takes its end for the promise that nobody writes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from tandem.errors import WorkerUnavailable
from tandem.prefix_store.memory_socket import receive_memory
from tandem.prefix_store.slab import SlabView
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import store_pb2, store_pb2_grpc
from tandem.tasks import cancel_all
from tandem.types import WorkerId

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientIdentity:
    """Who attaches, and what its blocks are; a store of other blocks refuses it."""

    worker_id: WorkerId
    fingerprint: str
    block_bytes: int
    num_layers: int


class ClientSession:
    """Made by `open_session`. Event loop only, but for `release`, `grant_over` and the memory."""

    def __init__(
        self,
        *,
        stub: store_pb2_grpc.PrefixStoreAsyncStub,
        attached: store_pb2.StoreAttached,
        call: Stream,
        slab: SlabView,
    ) -> None:
        self.stub = stub
        self.session_id = attached.session
        self.slab = slab
        self.is_stalled = False
        """Whether the store did not answer in time and has not been heard of since."""
        self._lease_s = attached.lease_s
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._heard_s = time.monotonic()
        self._loans: set[int] = set()
        self._lock = threading.Lock()
        self._grants: set[int] = set()
        self._socket: socket.socket | None = None
        self.is_over = False
        """Whether the stream has ended: nothing more can be asked."""

    def keep(self, connection: socket.socket) -> None:
        """Takes over the connection that the memory came from."""
        self._socket = connection

    async def serve(self) -> str:
        """Renews until the store is gone; why it is."""
        reader = asyncio.ensure_future(self._read())
        try:
            for number in itertools.count(1):
                renewal = store_pb2.StoreRenewal(number=number, loans=self._loans, grants=self._open_grants())
                self._call.send(store_pb2.StoreClientMessage(renew=renewal))
                await asyncio.wait({reader}, timeout=self._lease_s / RENEWALS_PER_LEASE)
                if reader.done():
                    return reader.result()
                if time.monotonic() - self._heard_s > self._lease_s:
                    return f"it did not answer for {self._lease_s:g} s"
            raise AssertionError("counts without end")
        finally:
            await cancel_all([reader])
            self._call.close()
            self._end()

    async def _read(self) -> str:
        try:
            async for _ in self._call.answers():
                self._heard_s = time.monotonic()
                self.is_stalled = False
        except grpc.aio.AioRpcError as exc:
            return from_rpc_error(exc).message
        return "it ended the session"

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            self._close_when_unused()

    def _close_when_unused(self) -> None:
        if self.is_over and not self._grants and self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- what is held

    def open_loan(self) -> int:
        """The number of a loan that will be asked for."""
        number = next(self._numbers)
        self._loans.add(number)
        return number

    def open_grant(self) -> int:
        """The number of a grant that will be asked for."""
        number = next(self._numbers)
        with self._lock:
            self._grants.add(number)
        return number

    def _open_grants(self) -> list[int]:
        with self._lock:
            return list(self._grants)

    def release(self, number: int) -> None:
        """A loan is not used any more. Any thread."""
        self._on_loop(store_pb2.StoreClientMessage(release=number), number)

    def cancel(self, number: int) -> None:
        """A grant is not written any more and will not be committed. Any thread."""
        self._on_loop(store_pb2.StoreClientMessage(cancel=number), number)

    def grant_over(self, number: int) -> None:
        """A grant was committed, so nothing of it is written any more. Any thread."""
        with self._lock:
            self._grants.discard(number)
            self._close_when_unused()

    def _on_loop(self, message: store_pb2.StoreClientMessage, number: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._say, message, number)
        except RuntimeError:
            self.grant_over(number)  # the loop is closed: the connection's end says the rest

    def _say(self, message: store_pb2.StoreClientMessage, number: int) -> None:
        self._loans.discard(number)
        if not self.is_over:
            self._call.send(message)
        self.grant_over(number)


class Stream:
    """The session's stream: messages out as they come, answers in."""

    def __init__(self, stub: store_pb2_grpc.PrefixStoreAsyncStub) -> None:
        self._outgoing: asyncio.Queue[store_pb2.StoreClientMessage | None] = asyncio.Queue()
        self._call = stub.Attach(self._messages())
        self._answers = self._call.__aiter__()

    async def _messages(self) -> AsyncIterator[store_pb2.StoreClientMessage]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    def send(self, message: store_pb2.StoreClientMessage) -> None:
        """Sends it when the stream takes it."""
        self._outgoing.put_nowait(message)

    def answers(self) -> AsyncIterator[store_pb2.StoreMessage]:
        """Until the store ends the stream; raises AioRpcError when it breaks."""
        return self._answers

    async def first(self) -> store_pb2.StoreAttached:
        """The answer to the hello. Raises WorkerUnavailable when there is none."""
        async for message in self._answers:
            return message.attached
        raise WorkerUnavailable("the prefix store ended the session at once")

    def close(self) -> None:
        """Ends it."""
        self._outgoing.put_nowait(None)
        self._call.cancel()


async def open_session(
    stub: store_pb2_grpc.PrefixStoreAsyncStub, identity: ClientIdentity, *, timeout_s: float
) -> ClientSession:
    """Attaches and maps the memory. Raises IncompatiblePeer, WorkerUnavailable, StoreError and other TandemErrors."""
    stream = Stream(stub)
    try:
        async with asyncio.timeout(timeout_s):
            hello = store_pb2.StoreHello(
                worker_id=identity.worker_id, fingerprint=identity.fingerprint, block_bytes=identity.block_bytes
            )
            stream.send(store_pb2.StoreClientMessage(hello=hello))
            attached = await stream.first()
            connection, slab = await _mapped(attached, identity.block_bytes, timeout_s)
    except grpc.aio.AioRpcError as exc:
        stream.close()
        raise from_rpc_error(exc) from exc
    except TimeoutError as exc:
        stream.close()
        raise WorkerUnavailable(f"the prefix store did not answer within {timeout_s:g} s") from exc
    except BaseException:
        stream.close()
        raise
    session = ClientSession(stub=stub, attached=attached, call=stream, slab=slab)
    session.keep(connection)
    return session


async def _mapped(
    attached: store_pb2.StoreAttached, block_bytes: int, timeout_s: float
) -> tuple[socket.socket, SlabView]:
    """`_map` on a thread. Who gives up waiting leaves no connection open."""
    mapping = asyncio.ensure_future(asyncio.to_thread(_map, attached, block_bytes, timeout_s))
    try:
        return await asyncio.shield(mapping)
    except asyncio.CancelledError:
        mapping.add_done_callback(_close_mapped)
        raise


def _close_mapped(mapping: asyncio.Future[tuple[socket.socket, SlabView]]) -> None:
    if mapping.exception() is None:
        mapping.result()[0].close()


def _map(attached: store_pb2.StoreAttached, block_bytes: int, timeout_s: float) -> tuple[socket.socket, SlabView]:
    connection, fd = receive_memory(attached.socket, attached.session, timeout_s=timeout_s)
    try:
        return connection, SlabView(fd, num_slots=attached.num_slots, block_bytes=block_bytes)
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(fd)
