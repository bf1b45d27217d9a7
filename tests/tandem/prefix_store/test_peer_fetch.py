"""Fetches between stores: which of them a store answers, and which messages the one that asked lets in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from cluster.store_host import StoreHost
from kv_transfer.block_claims import FetchClaims, fetch_code
from kv_transfer.block_fetch import PeerTier, StoreIdentity
from kv_transfer.digest import digest
from kv_transfer.loopback import ShmTransport
from kv_transfer.ticket import Claims, link_key
from kv_transfer.transport import MessageHeader
from tandem.errors import IncompatiblePeer, LinkTooSlow, TandemError, TicketRefused
from tandem.kv.prefix_index import PrefixIndex
from tandem.prefix_store.names import pack_names
from tandem.prefix_store.registry import StoreRecord
from tandem.prefix_store.tier import Fetched
from tandem.rpc.channels import Channels
from tandem.rpc.server import start_server
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import store_pb2, store_pb2_grpc
from tandem.secret import ClusterKey
from tandem.types import Epoch, HandoffId, RequestId, WorkerId
from tests.factories import CLUSTER_KEY
from tests.store_nodes import BLOCK_BYTES, FINGERPRINT, chain, client_of, put, run, store_node

OTHER_KEY = ClusterKey(b"o" * 32)
NAMES = chain(3)


def fetch_from(host: StoreHost, address: bytes, **changes: Any) -> FetchClaims:
    """What an honest store "near" asks."""
    honest = FetchClaims(
        transfer_id=HandoffId("ab" * 16),
        source=WorkerId(host.record.owner),
        source_epoch=Epoch(host.record.epoch),
        destination=WorkerId("store-near"),
        destination_epoch=Epoch(7),
        expires_s=time.time() + 5.0,
        address=address,
        names=pack_names(NAMES),
        first=0,
    )
    return replace(honest, **changes)


def request_of(fetch: FetchClaims, key: ClusterKey = CLUSTER_KEY, **changes: Any) -> store_pb2.StoreFetchRequest:
    """As a message, with its code; `changes` are made after that."""
    request = store_pb2.StoreFetchRequest(
        transfer_id=fetch.transfer_id,
        source=fetch.source,
        source_epoch=fetch.source_epoch,
        destination=fetch.destination,
        destination_epoch=fetch.destination_epoch,
        expires_s=fetch.expires_s,
        fingerprint=FINGERPRINT,
        block_bytes=BLOCK_BYTES,
        transport="shm",
        address=fetch.address,
        names=fetch.names,
        first=fetch.first,
        code=fetch_code(key, fetch),
    )
    for name, value in changes.items():
        setattr(request, name, value)
    return request


@asynccontextmanager
async def asking(redis_url: str, **changes: Any) -> AsyncIterator[tuple[StoreHost, bytes, Callable[..., Any]]]:
    """A store with three blocks, an address to send them to, and its Fetch call."""
    transport = ShmTransport(worker_id=WorkerId("near"))
    transport.serve(Counting())
    channels = Channels(CLUSTER_KEY)
    try:
        async with store_node(redis_url, "far", **changes) as host, client_of(host) as client:
            await put(client, NAMES)
            yield host, transport.address(), store_pb2_grpc.PrefixStorePeerStub(channels.get(host.record.address)).Fetch
    finally:
        await channels.close()
        transport.close()


class Counting:
    """A sink that takes nothing but probes, whose memory nobody looks at."""

    def place(self, header: MessageHeader) -> list[torch.Tensor]:
        return [torch.zeros(header.num_bytes, dtype=torch.uint8)]

    def landed(self, header: MessageHeader, error: TandemError | None) -> None:
        pass


async def refusal(fetch: Callable[..., Any], request: store_pb2.StoreFetchRequest) -> TandemError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fetch(request)
    return from_rpc_error(refused.value)


@pytest.mark.parametrize(
    ("claims", "changes", "why"),
    [
        ({"source": WorkerId("store-other")}, {}, "is for store-other"),
        ({"source_epoch": Epoch(999)}, {}, "in epoch 999"),
        ({"expires_s": 1.0}, {}, "is good until"),
        ({"expires_s": 9e9}, {}, "is good until"),
        ({}, {"address": b"tandem-shm/1/elsewhere"}, "does not carry"),
        ({}, {"names": pack_names(NAMES[:1])}, "does not carry"),
        ({}, {"first": 1}, "does not carry"),
        ({}, {"transfer_id": "cd" * 16}, "does not carry"),
        ({}, {"destination": "store-other"}, "does not carry"),
        ({}, {"code": b""}, "does not carry"),
    ],
)
def test_a_fetch_that_is_forged_misdirected_or_late_is_refused_and_sends_nothing(
    redis_url: str, claims: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    async def test() -> None:
        async with asking(redis_url) as (host, address, fetch):
            error = await refusal(fetch, request_of(fetch_from(host, address, **claims), **changes))
            assert type(error) is TicketRefused
            assert why in error.message
            assert "tandem_store_served_bytes_total 0.0" in host.store.metrics.render().decode()

    run(test)


def test_a_fetch_of_another_cluster_is_refused(redis_url: str) -> None:
    async def test() -> None:
        async with asking(redis_url) as (host, address, fetch):
            error = await refusal(fetch, request_of(fetch_from(host, address), OTHER_KEY))
            assert type(error) is TicketRefused

    run(test)


def test_a_fetch_is_answered_once(redis_url: str) -> None:
    async def test() -> None:
        async with asking(redis_url) as (host, address, fetch):
            request = request_of(fetch_from(host, address))
            assert (await fetch(request)).num_sent == len(NAMES)
            assert "used before" in (await refusal(fetch, request)).message

    run(test)


@pytest.mark.parametrize("kind", [{"fingerprint": "cd" * 16}, {"block_bytes": 4096}, {"transport": "ucx"}])
def test_a_fetch_of_another_kind_of_blocks_is_refused(redis_url: str, kind: dict[str, Any]) -> None:
    async def test() -> None:
        async with asking(redis_url) as (host, address, fetch):
            error = await refusal(fetch, request_of(fetch_from(host, address), **kind))
            assert type(error) is IncompatiblePeer

    run(test)


IMPOSSIBLE_GBPS = 1e6


def test_a_link_to_another_store_below_the_floor_is_used_and_said(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with asking(redis_url, min_gbps=IMPOSSIBLE_GBPS) as (host, address, fetch):
            assert "tandem_store_slow_links 0.0" in host.store.metrics.render().decode()
            assert (await fetch(request_of(fetch_from(host, address)))).num_sent == len(NAMES)
            assert "tandem_store_slow_links 1.0" in host.store.metrics.render().decode()

    with caplog.at_level(logging.WARNING):
        run(test)
    assert "slow link: shm (memfd) to store-near" in caplog.text


def test_a_link_to_another_store_below_the_floor_is_refused_when_strict(redis_url: str) -> None:
    async def test() -> None:
        async with asking(redis_url, min_gbps=IMPOSSIBLE_GBPS, strict=True) as (host, address, fetch):
            assert type(await refusal(fetch, request_of(fetch_from(host, address)))) is LinkTooSlow
            assert "tandem_store_served_bytes_total 0.0" in host.store.metrics.render().decode()

    run(test)


class CrookedPeer(store_pb2_grpc.PrefixStorePeerServicer):
    """A store that answers each fetch with one message: block 0 as it should be, but for `changes` or another `key`."""

    def __init__(self, key: ClusterKey, changes: dict[str, Any], *, then: int | None) -> None:
        self._key = key
        self._changes = changes
        self._then = then
        self._transport = ShmTransport(worker_id=WorkerId("crooked"))

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


async def fetched_from(peer: CrookedPeer, destination: torch.Tensor) -> Fetched:
    """What a store that asks it gets of one block."""
    server = await start_server(
        "127.0.0.1", 0, lambda s: store_pb2_grpc.add_PrefixStorePeerServicer_to_server(peer, s), ()
    )
    transport, channels = ShmTransport(worker_id=WorkerId("near")), Channels(CLUSTER_KEY)
    index = PrefixIndex()
    index.reset("store-far", epoch="1", seq=0, tiers={"host": NAMES})
    identity = StoreIdentity(
        owner=WorkerId("store-near"), epoch=Epoch(7), fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES
    )
    tier = PeerTier(identity, transport=transport, key=CLUSTER_KEY, index=index, channels=channels)
    tier.set_peers([record_at(server.address)])
    try:
        return await tier.fetch(NAMES[:1], first=0, destinations=[destination], timeout_s=5.0)
    finally:
        await channels.close()
        await server.stop(0.0)
        transport.close()
        peer.close()


def record_at(address: str) -> StoreRecord:
    return StoreRecord(
        node="far",
        owner="store-far",
        address=address,
        epoch=1,
        fingerprint=FINGERPRINT,
        block_bytes=BLOCK_BYTES,
        transport="shm",
        transport_address="",
        metrics_url="",
        capacity_blocks=16,
        pid=1,
    )


def test_the_block_of_a_fetch_is_written_once() -> None:
    destination = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    fetched = asyncio.run(fetched_from(CrookedPeer(CLUSTER_KEY, {}, then=2), destination))
    assert fetched.digests == [digest([torch.ones(BLOCK_BYTES, dtype=torch.uint8)])]
    assert bool((destination == 1).all())


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        (OTHER_KEY, {}),
        (CLUSTER_KEY, {"epoch": Epoch(6)}),
        (CLUSTER_KEY, {"digest": 0}),
        (CLUSTER_KEY, {"first_block": 1}),
        (CLUSTER_KEY, {"num_blocks": 2}),
        (CLUSTER_KEY, {"num_bytes": BLOCK_BYTES // 2}),
    ],
    ids=["forged", "of an earlier life", "without a digest", "not asked for", "two blocks", "too short"],
)
def test_a_message_that_is_not_the_fetchs_own_is_not_written(key: ClusterKey, changes: dict[str, Any]) -> None:
    destination = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    assert asyncio.run(fetched_from(CrookedPeer(key, changes, then=None), destination)).digests == []
    assert not bool(destination.any())
