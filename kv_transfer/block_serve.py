"""Sends blocks of this node's host tier to other nodes' stores that ask for them, over the transport.

Blocks are kept where they are until the transport no longer reads them; a peer that does not take them is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import grpc

from kv_transfer.block_claims import FetchClaims, check_fetch
from kv_transfer.block_fetch import StoreIdentity
from kv_transfer.links import LinkTable
from kv_transfer.ticket import MAX_SKEW_S, link_key
from kv_transfer.transport import Link, MessageHeader, Transport
from tandem.errors import IncompatiblePeer, Overloaded, TicketRefused, TransportError
from tandem.prefix_store.blocks import Held
from tandem.prefix_store.names import unpack_names
from tandem.prefix_store.store import NodeStore
from tandem.rpc.status import typed_errors
from tandem.rpc.tandem.v1 import store_pb2, store_pb2_grpc
from tandem.secret import ClusterKey, ReplayGuard
from tandem.types import Epoch, HandoffId, WorkerId

logger = logging.getLogger(__name__)

PEER_SERVICE = "tandem.v1.PrefixStorePeer"
MAX_SENDING = 8
"""Fetches that are served at a time."""
MAX_FETCH_S = 60.0
WINDOW_BYTES = 32 << 20
"""What is under way to one peer at a time."""

Context = grpc.aio.ServicerContext[Any, Any]


class PeerServicer(store_pb2_grpc.PrefixStorePeerServicer):
    """Serves the host tier of `store` over `links` of its `transport`."""

    def __init__(
        self, store: NodeStore, identity: StoreIdentity, *, transport: Transport, links: LinkTable, key: ClusterKey
    ) -> None:
        self._store = store
        self._identity = identity
        self._transport = transport
        self._key = key
        self._links = links
        self._used = ReplayGuard()
        self._num_sending = 0

    async def Fetch(self, request: store_pb2.StoreFetchRequest, context: Context) -> store_pb2.StoreFetchReply:
        """Sends what there is of a prefix."""
        async with typed_errors(context):
            fetch = self._checked(request)
            if self._num_sending >= MAX_SENDING:
                raise Overloaded("this store sends to as many others as it may")
            held = self._store.host.borrow(unpack_names(fetch.names))
            self._num_sending += 1
            try:
                num_sent = await self._send(fetch, held[fetch.first :]) if len(held) > fetch.first else 0
            finally:
                self._store.give_back(held)
                self._num_sending -= 1
            self._store.metrics.served_bytes.inc(num_sent * self._identity.block_bytes)
            return store_pb2.StoreFetchReply(num_sent=num_sent)

    @property
    def num_slow_links(self) -> int:
        """Open links that were measured below the floor."""
        return sum(known.slow for known in self._links.links())

    def close(self) -> None:
        """Cuts all peers off."""
        self._links.close()

    def _checked(self, request: store_pb2.StoreFetchRequest) -> FetchClaims:
        """Raises TicketRefused, or IncompatiblePeer."""
        fetch = FetchClaims(
            transfer_id=HandoffId(request.transfer_id),
            source=WorkerId(request.source),
            source_epoch=Epoch(request.source_epoch),
            destination=WorkerId(request.destination),
            destination_epoch=Epoch(request.destination_epoch),
            expires_s=request.expires_s,
            address=request.address,
            names=request.names,
            first=request.first,
        )
        check_fetch(self._key, fetch, request.code)
        now, what = time.time(), f"the fetch {fetch.transfer_id}"
        ours = self._identity
        if (fetch.source, fetch.source_epoch) != (ours.owner, ours.epoch):
            raise TicketRefused(f"{what} is for {fetch.source} in epoch {fetch.source_epoch}")
        if not now - MAX_SKEW_S < fetch.expires_s < now + MAX_FETCH_S + MAX_SKEW_S:
            raise TicketRefused(f"{what} is good until {fetch.expires_s - now:.1f} s from now")
        if not self._used.use(fetch.transfer_id.encode(), expires_s=fetch.expires_s + MAX_SKEW_S, now=now):
            raise TicketRefused(f"{what} was used before")
        kind = (request.fingerprint, request.block_bytes, request.transport)
        if kind != (ours.fingerprint, ours.block_bytes, self._transport.name):
            raise IncompatiblePeer(f"{fetch.destination} has blocks of another kind or another transport: {kind}")
        return fetch

    async def _send(self, fetch: FetchClaims, held: Sequence[Held]) -> int:
        """How many leading blocks were taken. Returns when the transport reads none of them any more."""
        left_s = max(0.1, fetch.expires_s - time.time())
        try:
            async with asyncio.timeout(left_s):
                link, _ = await self._links.get(fetch.destination, fetch.address, epoch=fetch.destination_epoch)
        except TimeoutError as exc:
            raise TransportError(f"{fetch.destination} cannot be reached within {left_s:.1f} s") from exc
        key = link_key(self._key, fetch.claims())
        sends: list[Future[None]] = []
        try:
            async with asyncio.timeout(left_s):
                for index, one in enumerate(held):
                    await self._take_turn(sends)
                    sends.append(link.send(self._header(fetch, index, one, key), [self._tensor(one)]))
                await _over(sends)
        except TimeoutError as exc:
            raise TransportError(f"{fetch.destination} did not take its blocks within {left_s:.1f} s") from exc
        finally:
            await asyncio.shield(self._settle(link, sends))
        return _num_taken(sends)

    async def _take_turn(self, sends: Sequence[Future[None]]) -> None:
        """Until a window of bytes has room for one more block: what a transport buffers is bounded by it."""
        window = max(1, WINDOW_BYTES // self._identity.block_bytes)
        if len(sends) >= window:
            await _over([sends[len(sends) - window]])

    async def _settle(self, link: Link, sends: Sequence[Future[None]]) -> None:
        if not all(send.done() for send in sends):
            logger.warning("a peer does not take the blocks that it asked for: it is cut off")
            await asyncio.to_thread(self._links.drop, link)
            await _over(sends)
        elif any(isinstance(send.exception(), TransportError) for send in sends):
            self._links.drop(link)

    def _header(self, fetch: FetchClaims, index: int, held: Held, key: bytes) -> MessageHeader:
        header = MessageHeader(
            handoff_id=fetch.transfer_id,
            epoch=fetch.destination_epoch,
            layer=0,
            first_block=index,
            num_blocks=1,
            num_bytes=self._identity.block_bytes,
            digest=held.digest,
        )
        return header.sealed(key)

    def _tensor(self, held: Held) -> Any:
        return self._store.host.slab.tensor_of(held.slot)


async def _over(sends: Sequence[Future[None]]) -> None:
    """Until all of them have ended, well or not; a wait that is given up ends none of them."""
    if sends:
        await asyncio.wait([asyncio.wrap_future(send) for send in sends])


def _num_taken(sends: Sequence[Future[None]]) -> int:
    """Leading ones that went well."""
    return next((index for index, send in enumerate(sends) if send.exception() is not None), len(sends))
