"""What a worker has of its node's prefix store. The store may be away: then there is nothing in it, and that at once.

The client attaches by itself whenever the store is there. No call raises because of the store; failures are counted,
and logged once for each time that it goes away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from tandem.errors import IncompatiblePeer, TandemError, WorkerUnavailable
from tandem.kv.tiering import Tier, TierSpeed
from tandem.prefix_store.client_session import ClientIdentity, ClientSession, open_session
from tandem.prefix_store.holdings import Found, Grant, Loan
from tandem.prefix_store.names import pack_names
from tandem.rpc.channels import Channels
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import store_pb2, store_pb2_grpc
from tandem.secret import ClusterKey
from tandem.tasks import cancel_all, raise_if_cancelled
from tandem.types import BlockHash

logger = logging.getLogger(__name__)

R = TypeVar("R")

Locate = Callable[[], Awaitable[str]]
"""Says where the store listens now (host:port); "" when that is not known. Does not raise."""

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 2.0
_GRACE_S = 0.5
"""What a call may take beyond the time that the store was given."""
_LONG_S = 600.0
"""For reading everything again."""


def at(address: str) -> Locate:
    """A store that stays where it is."""

    async def locate() -> str:
        return address

    return locate


class StoreClient:
    """Event loop only; what it hands out says what is for any thread. Made by `attach`."""

    def __init__(self, locate: Locate, *, key: ClusterKey, identity: ClientIdentity, timeout_s: float) -> None:
        self.num_failures = 0
        """Calls that the store did not answer."""
        self.on_attached: Callable[[], None] = lambda: None
        """Called whenever the store is there, for the first time or again: it may have nothing."""
        self._locate = locate
        self._identity = identity
        self._timeout_s = timeout_s
        self._channels = Channels(key)
        self._session: ClientSession | None = None
        self._attached = asyncio.Event()
        self._refusal: IncompatiblePeer | None = None
        self._is_away = False
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def attach(
        cls, locate: Locate, *, key: ClusterKey, identity: ClientIdentity, timeout_s: float = 2.0
    ) -> StoreClient:
        """A client, attached unless the store is away for longer than `timeout_s`, which every call has too.

        Raises IncompatiblePeer when the store is of another model or layout.
        """
        client = cls(locate, key=key, identity=identity, timeout_s=timeout_s)
        client._keeper = asyncio.ensure_future(client._keep_attached())
        await client.wait_attached(timeout_s)
        if client._refusal is not None:
            await client.close()
            raise client._refusal
        return client

    @property
    def is_attached(self) -> bool:
        """Whether the store is there."""
        return self._session is not None

    async def wait_attached(self, timeout_s: float) -> bool:
        """Waits for the store; whether it is there."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._attached.wait()
        except TimeoutError:
            return False
        return self.is_attached

    async def close(self) -> None:
        """Detaches: loans end, and grants once they are committed or cancelled."""
        if self._keeper is not None:
            await cancel_all([self._keeper])
        await self._channels.close()

    # --- blocks

    async def lookup(self, names: Sequence[BlockHash]) -> Found:
        """How long a prefix each tier has."""
        request = store_pb2.StoreLookupRequest(names=pack_names(names))
        reply = await self._ask(lambda session: session.stub.Lookup(request, timeout=self._timeout_s))
        if reply is None:
            return Found()
        rates = {Tier.DISK: reply.disk_bytes_per_s, Tier.REMOTE: reply.remote_bytes_per_s}
        speeds = {tier: TierSpeed(bytes_per_s=rate) for tier, rate in rates.items() if rate > 0}
        return Found(num_host=reply.num_host, num_disk=reply.num_disk, num_remote=reply.num_remote, speeds=speeds)

    async def acquire(self, names: Sequence[BlockHash], *, tenant: str = "", timeout_s: float = 1.0) -> Loan:
        """Leading blocks in the host tier, loaded from disk or a peer if that takes no longer than `timeout_s`."""
        session = self._session
        if session is None or not names:
            return Loan()
        number = session.open_loan()
        request = store_pb2.StoreAcquireRequest(
            session=session.session_id, loan=number, names=pack_names(names), tenant=tenant, timeout_s=timeout_s
        )
        try:
            reply = await self._ask(lambda s: s.stub.Acquire(request, timeout=timeout_s + _GRACE_S), session)
        except asyncio.CancelledError:
            session.release(number)
            raise
        if reply is None or not reply.slots:
            session.release(number)
            return Loan()
        return Loan(
            session, number, slots=reply.slots, generations=reply.generations, num_layers=self._identity.num_layers
        )

    async def put(self, names: Sequence[BlockHash], *, first: int = 0, tenant: str = "") -> Grant:
        """Slots for those of `names[first:]` that the store lacks; `names` is the whole prefix from its first block."""
        session = self._session
        if session is None or len(names) <= first:
            return Grant()
        number = session.open_grant()
        request = store_pb2.StoreReserveRequest(
            session=session.session_id, grant=number, names=pack_names(names), first=first, tenant=tenant
        )
        try:
            reply = await self._ask(lambda s: s.stub.Reserve(request, timeout=self._timeout_s), session)
        except asyncio.CancelledError:
            session.cancel(number)
            raise
        if reply is None or not reply.slots:
            session.cancel(number)
            return Grant()
        return Grant(
            session,
            number,
            first=reply.first,
            slots=reply.slots,
            num_layers=self._identity.num_layers,
            commit=self._commit,
        )

    async def _commit(self, session: ClientSession, number: int, digests: Sequence[int]) -> int:
        request = store_pb2.StoreCommitRequest(session=session.session_id, grant=number, digests=digests)
        try:
            reply = await self._ask(lambda s: s.stub.Commit(request, timeout=self._timeout_s), session)
        except asyncio.CancelledError:
            session.cancel(number)
            raise
        if reply is None:
            session.cancel(number)
            return 0
        session.grant_over(number)
        return reply.num_committed

    # --- people

    async def pin(self, names: Sequence[BlockHash]) -> int:
        """Keeps what the store has of a prefix; how many blocks."""
        request = store_pb2.StorePrefix(names=pack_names(names))
        reply = await self._ask(lambda session: session.stub.Pin(request, timeout=self._timeout_s))
        return 0 if reply is None else reply.count

    async def unpin(self, names: Sequence[BlockHash]) -> int:
        """Takes a pin away; from how many blocks."""
        request = store_pb2.StorePrefix(names=pack_names(names))
        reply = await self._ask(lambda session: session.stub.Unpin(request, timeout=self._timeout_s))
        return 0 if reply is None else reply.count

    async def clear(self) -> int:
        """Forgets all that is not pinned; how many blocks."""
        request = store_pb2.StoreClearRequest()
        reply = await self._ask(lambda session: session.stub.Clear(request, timeout=_LONG_S))
        return 0 if reply is None else reply.count

    async def verify(self) -> tuple[int, int]:
        """Has every block of the host tier read again: (checked, damaged and removed)."""
        request = store_pb2.StoreVerifyRequest()
        reply = await self._ask(lambda session: session.stub.Verify(request, timeout=_LONG_S))
        return (0, 0) if reply is None else (reply.num_checked, reply.num_damaged)

    async def stats(self) -> store_pb2.StoreStats | None:
        """What the store says of itself; None when it is away."""
        request = store_pb2.StoreStatsRequest()
        return await self._ask(lambda session: session.stub.GetStats(request, timeout=self._timeout_s))

    async def list_hottest(self, limit: int = 100) -> list[store_pb2.StoreBlock]:
        """The most used blocks of the host tier."""
        request = store_pb2.StoreListRequest(limit=limit)
        reply = await self._ask(lambda session: session.stub.List(request, timeout=self._timeout_s))
        return [] if reply is None else list(reply.blocks)

    # --- the store, there or away

    async def _ask(
        self, call: Callable[[ClientSession], Awaitable[R]], session: ClientSession | None = None
    ) -> R | None:
        """The answer; None when there is no store, or none that answers."""
        session = session or self._session
        if session is None or session.is_over or session.is_stalled:
            return None
        try:
            answer = await call(session)
        except grpc.aio.AioRpcError as exc:
            self.num_failures += 1
            session.is_stalled = session.is_stalled or exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self._note_away(from_rpc_error(exc).message)
            return None
        except asyncio.CancelledError:
            raise_if_cancelled()
            self.num_failures += 1
            return None  # the session ended, and its channel was closed under the call
        self._is_away = False
        return answer

    async def _keep_attached(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            address = await self._locate()
            try:
                session = await self._open(address)
            except IncompatiblePeer as exc:
                self._refusal = exc
                self._attached.set()
                self._note_away(exc.message)
            except TandemError as exc:
                self._note_away(exc.message)
            except Exception:  # a fault of ours here must not leave the worker without a store for good
                logger.exception("attaching to the prefix store failed")
            else:
                backoff_s = _FIRST_BACKOFF_S
                self._note_away(await self._use(session))
            if address:
                self._channels.drop(address)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _open(self, address: str) -> ClientSession:
        if not address:
            raise WorkerUnavailable("no prefix store is registered on this node")
        channel = self._channels.get(address)
        stub: Any = store_pb2_grpc.PrefixStoreStub(channel)
        return await open_session(stub, self._identity, timeout_s=self._timeout_s)

    async def _use(self, session: ClientSession) -> str:
        if self._is_away:
            logger.info("worker %s is attached to its prefix store again", self._identity.worker_id)
        self._is_away = False
        self._refusal = None
        self._session = session
        self._attached.set()
        self.on_attached()
        try:
            return await session.serve()
        finally:
            self._session = None
            self._attached.clear()

    def _note_away(self, why: str) -> None:
        if not self._is_away:
            self._is_away = True
            logger.warning("worker %s is without its prefix store: %s", self._identity.worker_id, why)
