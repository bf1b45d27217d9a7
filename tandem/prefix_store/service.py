"""The store's gRPC service for the workers of its node; see proto/tandem/v1/store.proto. Holds no policy."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

import grpc

from tandem.errors import IncompatiblePeer, InvalidRequest, WorkerUnavailable
from tandem.observability.store_metrics import StoreSample
from tandem.prefix_store.levels import StoreLevels
from tandem.prefix_store.memory_socket import MemorySocket
from tandem.prefix_store.names import unpack_names
from tandem.prefix_store.sessions import Session, SessionTable
from tandem.prefix_store.store import NodeStore
from tandem.rpc.status import typed_errors
from tandem.rpc.tandem.v1 import store_pb2, store_pb2_grpc
from tandem.tasks import cancel_all
from tandem.types import BlockHash

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Messages = AsyncIterator[store_pb2.StoreClientMessage]
Answers: TypeAlias = "asyncio.Queue[store_pb2.StoreMessage | None]"
"""None ends the session."""

SERVICE = "tandem.v1.PrefixStore"
MAX_LISTED = 10_000
MAX_WAIT_S = 60.0


class PrefixStoreServicer(store_pb2_grpc.PrefixStoreServicer):
    """Serves `store` and gives its memory, `fd`, to its clients. Needs `start`, then `close`, on the event loop."""

    def __init__(self, store: NodeStore, fd: int, *, node: str) -> None:
        self._store = store
        self._node = node
        self._settings = store.settings
        self._sessions = SessionTable(lease_s=store.settings.lease_s, give_back=store.give_back, cancel=store.cancel)
        self._levels = StoreLevels(store, self._sessions)
        self._socket = MemorySocket(fd, given=self._memory_asked, gone=self._sessions.memory_gone)
        self._ticker: asyncio.Task[None] | None = None

    def sample(self) -> StoreSample:
        """The store now, for metrics."""
        return self._levels.sample()

    @property
    def memory_address(self) -> bytes:
        """The socket at which clients are given the memory."""
        return self._socket.address

    def start(self) -> None:
        """Takes clients from now on."""
        self._socket.start()
        self._ticker = asyncio.ensure_future(self._tick())

    async def close(self) -> None:
        """Gives the memory to nobody any more."""
        if self._ticker is not None:
            await cancel_all([self._ticker])
        await self._socket.close()

    def _memory_asked(self, session_id: str) -> bool:
        try:
            session = self._sessions.get(session_id)
        except WorkerUnavailable:
            return False
        self._sessions.memory_given(session)
        return True

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 4)
            for session in self._sessions.expire(time.monotonic()):
                logger.warning(
                    "worker %s was silent for %g s: its loans are over", session.worker_id, self._settings.lease_s
                )

    # --- sessions

    async def Attach(self, messages: Messages, context: Context) -> AsyncIterator[store_pb2.StoreMessage]:
        """One client's session."""
        async with typed_errors(context):
            hello = await self._hello(messages)
            answers: Answers = asyncio.Queue()
            session = self._sessions.open(hello.worker_id, end=lambda: answers.put_nowait(None), now=time.monotonic())
            answers.put_nowait(store_pb2.StoreMessage(attached=self._attached(session)))
            reader = asyncio.ensure_future(self._read(session, messages, answers))
            reader.add_done_callback(lambda _: answers.put_nowait(None))
            try:
                while (answer := await answers.get()) is not None:
                    yield answer
                if reader.done():
                    reader.result()  # raises what was wrong with a message
            finally:
                self._sessions.close(session)
                await cancel_all([reader])

    async def _read(self, session: Session, messages: Messages, answers: Answers) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind == "renew":
                renew = message.renew
                self._sessions.renew(session, loans=renew.loans, grants=renew.grants, now=time.monotonic())
                answers.put_nowait(store_pb2.StoreMessage(renewed=renew.number))
            elif kind == "release":
                self._sessions.release(session, message.release)
            elif kind == "cancel":
                self._sessions.cancel_grant(session, message.cancel)
            else:
                raise InvalidRequest(f"a second {kind or 'empty message'} in one session")

    async def _hello(self, messages: Messages) -> store_pb2.StoreHello:
        """The first message. Raises InvalidRequest, or IncompatiblePeer for a client with other blocks."""
        async for message in messages:
            if message.WhichOneof("message") == "hello":
                self._check_hello(message.hello)
                return message.hello
            break
        raise InvalidRequest("a session begins with a hello")

    def _check_hello(self, hello: store_pb2.StoreHello) -> None:
        ours = (self._settings.fingerprint, self._settings.block_bytes)
        theirs = (hello.fingerprint, hello.block_bytes)
        if ours != theirs:
            raise IncompatiblePeer(
                f"this store holds blocks of model {ours[0]}, {ours[1]} bytes each; "
                f"worker {hello.worker_id} has {theirs[0]}, {theirs[1]} bytes"
            )

    def _attached(self, session: Session) -> store_pb2.StoreAttached:
        return store_pb2.StoreAttached(
            session=session.session_id,
            socket=self.memory_address,
            num_slots=self._settings.num_slots,
            lease_s=self._settings.lease_s,
        )

    # --- blocks

    async def Lookup(self, request: store_pb2.StoreLookupRequest, context: Context) -> store_pb2.StoreLookupReply:
        """How long a prefix each tier has."""
        async with typed_errors(context):
            found = self._store.lookup(unpack_names(request.names))
        return store_pb2.StoreLookupReply(
            num_host=found.num_host,
            num_disk=found.num_disk,
            num_remote=found.num_remote,
            disk_bytes_per_s=found.disk_bytes_per_s,
            remote_bytes_per_s=found.remote_bytes_per_s,
        )

    async def Acquire(self, request: store_pb2.StoreAcquireRequest, context: Context) -> store_pb2.StoreAcquireReply:
        """A loan."""
        async with typed_errors(context):
            session = self._sessions.get(request.session)
            names = unpack_names(request.names)
            timeout_s = min(max(0.0, request.timeout_s), MAX_WAIT_S)
            held = await self._store.acquire(names, tenant=request.tenant, timeout_s=timeout_s)
            self._sessions.lend(session, request.loan, held, now=time.monotonic())
        return store_pb2.StoreAcquireReply(
            slots=[one.slot for one in held], generations=[one.generation for one in held]
        )

    async def Reserve(self, request: store_pb2.StoreReserveRequest, context: Context) -> store_pb2.StoreReserveReply:
        """A grant."""
        async with typed_errors(context):
            session = self._sessions.get(request.session)
            if not session.has_memory:
                raise InvalidRequest("slots are granted to clients that have the store's memory only")
            names = unpack_names(request.names)
            reservation = await self._store.reserve(names, first=request.first, tenant=request.tenant)
            if reservation is None:
                return store_pb2.StoreReserveReply()
            self._sessions.grant(session, request.grant, reservation, tenant=request.tenant, now=time.monotonic())
        return store_pb2.StoreReserveReply(first=reservation.first, slots=reservation.slots)

    async def Commit(self, request: store_pb2.StoreCommitRequest, context: Context) -> store_pb2.StoreCommitReply:
        """The end of a grant."""
        async with typed_errors(context):
            grant = self._sessions.take_grant(self._sessions.get(request.session), request.grant)
            if grant is None:
                return store_pb2.StoreCommitReply()
            committed = self._store.commit(grant.reservation, list(request.digests), tenant=grant.tenant)
            return store_pb2.StoreCommitReply(num_committed=await committed)

    # --- people

    async def Pin(self, request: store_pb2.StorePrefix, context: Context) -> store_pb2.StoreCount:
        """Keeps blocks."""
        async with typed_errors(context):
            return store_pb2.StoreCount(count=self._store.pin(self._prefix(request)))

    async def Unpin(self, request: store_pb2.StorePrefix, context: Context) -> store_pb2.StoreCount:
        """The reverse."""
        async with typed_errors(context):
            return store_pb2.StoreCount(count=self._store.unpin(self._prefix(request)))

    def _prefix(self, request: store_pb2.StorePrefix) -> Sequence[BlockHash]:
        """The blocks that are meant; none where a last block is not here. Raises InvalidRequest."""
        names, last = unpack_names(request.names), unpack_names(request.last)
        if bool(names) == bool(last) or len(last) > 1:
            raise InvalidRequest("a prefix is given by its names or by its last one", param="names")
        return self._store.chain(last[0]) if last else names

    async def Clear(self, request: store_pb2.StoreClearRequest, context: Context) -> store_pb2.StoreCount:
        """Forgets what is not pinned."""
        async with typed_errors(context):
            return store_pb2.StoreCount(count=await self._store.clear())

    async def Verify(self, request: store_pb2.StoreVerifyRequest, context: Context) -> store_pb2.StoreVerifyReply:
        """Reads everything again."""
        async with typed_errors(context):
            num_checked, num_damaged = await self._store.verify()
            return store_pb2.StoreVerifyReply(num_checked=num_checked, num_damaged=num_damaged)

    async def GetStats(self, request: store_pb2.StoreStatsRequest, context: Context) -> store_pb2.StoreStats:
        """Levels and counts."""
        async with typed_errors(context):
            return self._levels.stats(self._node)

    async def List(self, request: store_pb2.StoreListRequest, context: Context) -> store_pb2.StoreListReply:
        """The hottest prefixes."""
        async with typed_errors(context):
            hottest = self._store.host.hottest(min(request.limit, MAX_LISTED))
            return store_pb2.StoreListReply(
                blocks=[
                    store_pb2.StoreBlock(
                        name=b.name, tenant=b.tenant, depth=b.depth, num_uses=b.num_uses, pinned=b.pinned
                    )
                    for b in hottest
                ]
            )
