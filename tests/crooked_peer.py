"""A peer of a prefix store that sends what a test makes it send, and the remote tier that asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch

from kv_transfer.block_fetch import PeerTier, StoreIdentity
from kv_transfer.digest import digest
from kv_transfer.ticket import Claims, link_key
from kv_transfer.transport import MessageHeader, Transport
from kv_transfer.transports import make_transport
from tandem.config import TransportName
from tandem.kv.prefix_index import PrefixIndex
from tandem.prefix_store.registry import StoreRecord
from tandem.rpc.channels import Channels
from tandem.rpc.server import start_server
from tandem.rpc.tandem.v1 import store_pb2, store_pb2_grpc
from tandem.secret import ClusterKey
from tandem.types import Epoch, HandoffId, RequestId, WorkerId
from tests.factories import CLUSTER_KEY
from tests.store_nodes import BLOCK_BYTES, FINGERPRINT, chain

NAMES = chain(3)


class CrookedPeer(store_pb2_grpc.PrefixStorePeerServicer):
    """A store that answers each fetch with one message: block 0 as it should be, but for `changes` or another `key`.

    With `then`, the same block again, its bytes being this number.
    """

    def __init__(
        self, key: ClusterKey, changes: dict[str, Any], *, then: int | None, transport: TransportName = "shm"
    ) -> None:
        self._key = key
        self._changes = changes
        self._then = then
        self._transport = make_transport(transport, worker_id=WorkerId("crooked"))

    async def Fetch(self, request: store_pb2.StoreFetchRequest, context: Any) -> store_pb2.StoreFetchReply:
        link = await asyncio.to_thread(self._transport.connect, request.address)
        for value in (1, self._then):
            if value is None:
                continue
            payload = self._transport.allocate(self._changes.get("num_bytes", BLOCK_BYTES)).fill_(value)
            await asyncio.wrap_future(link.send(self._header(request, payload), [payload]))
        return store_pb2.StoreFetchReply(num_sent=0 if self._changes or self._key != CLUSTER_KEY else 1)

    def _header(self, request: store_pb2.StoreFetchRequest, payload: torch.Tensor) -> MessageHeader:
        claims = Claims(
            handoff_id=HandoffId(request.transfer_id),
            request_id=RequestId(""),
            source=WorkerId(request.source),
            source_epoch=Epoch(request.source_epoch),
            destination=WorkerId(request.destination),
            destination_epoch=Epoch(request.destination_epoch),
            expires_s=request.expires_s,
        )
        honest = MessageHeader(
            handoff_id=claims.handoff_id,
            epoch=claims.destination_epoch,
            layer=0,
            first_block=0,
            num_blocks=1,
            num_bytes=payload.numel(),
            digest=digest([payload]),
        )
        return replace(honest, **self._changes).sealed(link_key(self._key, claims))

    def close(self) -> None:
        self._transport.close()


@asynccontextmanager
async def store_near(peer: CrookedPeer, transport: Transport) -> AsyncIterator[PeerTier]:
    """The remote tier of a store that knows this peer, and believes that it has the first of `NAMES`."""
    server = await start_server(
        "127.0.0.1", 0, lambda s: store_pb2_grpc.add_PrefixStorePeerServicer_to_server(peer, s), ()
    )
    channels = Channels(CLUSTER_KEY)
    index = PrefixIndex()
    index.reset("store-far", epoch="1", seq=0, tiers={"host": NAMES})
    identity = StoreIdentity(
        owner=WorkerId("store-near"), epoch=Epoch(7), fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES
    )
    tier = PeerTier(identity, transport=transport, key=CLUSTER_KEY, index=index, channels=channels)
    tier.set_peers([_record_at(server.address, transport.name)])
    try:
        yield tier
    finally:
        await channels.close()
        await server.stop(0.0)
        transport.close()
        peer.close()


def _record_at(address: str, transport: str) -> StoreRecord:
    return StoreRecord(
        node="far",
        owner="store-far",
        address=address,
        epoch=1,
        fingerprint=FINGERPRINT,
        block_bytes=BLOCK_BYTES,
        transport=transport,
        transport_address="",
        metrics_url="",
        capacity_blocks=16,
        pid=1,
    )
