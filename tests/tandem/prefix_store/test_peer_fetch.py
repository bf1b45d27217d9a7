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
from kv_transfer.digest import digest
from kv_transfer.loopback import ShmTransport
from kv_transfer.transport import MessageHeader
from kv_transfer.transports import make_transport
from tandem.config import TransportName
from tandem.errors import IncompatiblePeer, LinkTooSlow, TandemError, TicketRefused
from tandem.prefix_store.names import pack_names
from tandem.prefix_store.tier import Fetched
from tandem.rpc.channels import Channels
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import store_pb2, store_pb2_grpc
from tandem.secret import ClusterKey
from tandem.types import Epoch, HandoffId, WorkerId
from tests.crooked_peer import NAMES, CrookedPeer, store_near
from tests.factories import CLUSTER_KEY
from tests.fakes import HeldUpTransport
from tests.store_nodes import BLOCK_BYTES, FINGERPRINT, client_of, put, run, store_node, until

OTHER_KEY = ClusterKey(b"o" * 32)


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


async def fetched_from(peer: CrookedPeer, destination: torch.Tensor) -> Fetched:
    """What a store that asks it gets of one block."""
    async with store_near(peer, ShmTransport(worker_id=WorkerId("near"))) as tier:
        return await tier.fetch(NAMES[:1], first=0, destinations=[destination], timeout_s=5.0)


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


@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_a_fetch_that_is_given_up_in_a_message_ends_when_nothing_writes_its_slot_any_more(
    transport: TransportName, caplog: pytest.LogCaptureFixture
) -> None:
    async def given_up() -> None:
        near = HeldUpTransport(make_transport(transport, worker_id=WorkerId("near")))
        slot = near.allocate(BLOCK_BYTES)
        async with store_near(CrookedPeer(CLUSTER_KEY, {}, then=None, transport=transport), near) as tier:
            fetch = asyncio.create_task(tier.fetch(NAMES[:1], first=0, destinations=[slot], timeout_s=20.0))
            await until(near.placed.is_set)
            fetch.cancel()
            await until(lambda: "it was given up" in caplog.text)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not fetch.done(), "the slot may go to another block, and the message is still to be written"
            near.go()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            slot.fill_(9)
            await asyncio.wrap_future(near.quiesce(HandoffId("ab" * 16)))
            assert bool((slot == 9).all())

    run(given_up)
