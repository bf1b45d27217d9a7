"""Blocks that come into the host tier from disk and from other nodes, and go down to disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.store_host import StoreHost
from tandem.prefix_store.client import StoreClient
from tests.fakes import Fault, FaultyTransport
from tests.store_nodes import BLOCK_BYTES, chain, client_of, is_right, put, run, store_node, until


@asynccontextmanager
async def two_nodes(
    redis_url: str, **changes: Any
) -> AsyncIterator[tuple[StoreHost, StoreHost, StoreClient, StoreClient]]:
    """Nodes "far" and "near" with a client each."""
    async with (
        store_node(redis_url, "far", **changes) as far,
        store_node(redis_url, "near", **changes) as near,
        client_of(far, "f") as remote,
        client_of(near, "n") as client,
    ):
        yield far, near, remote, client


async def known(client: StoreClient, num_blocks: int, seed: int = 0) -> None:
    """Until the client's store has heard of a peer's blocks."""

    async def is_known() -> bool:
        return (await client.lookup(chain(num_blocks, seed))).num_remote == num_blocks

    await until(is_known)


def test_a_restarted_store_is_empty_in_its_host_tier_and_full_from_disk(redis_url: str, tmp_path: Path) -> None:
    async def test() -> None:
        names = chain(10)
        async with store_node(redis_url, disk=tmp_path) as host, client_of(host) as client:
            assert await put(client, names) == 10
        async with store_node(redis_url, disk=tmp_path) as host, client_of(host) as client:
            found = await client.lookup(names)
            assert (found.num_host, found.num_disk) == (0, 10)
            loan = await client.acquire(names)
            assert len(loan.slots) == 10
            assert is_right(loan, names)
            loan.release()
            found = await client.lookup(names)
            assert found.num_host == 10
            assert found.speeds
            page = host.store.metrics.render().decode()
            assert 'tandem_store_hit_blocks_total{tier="disk"} 10.0' in page
            host.store.host.check_invariants()

    run(test)


def test_what_makes_room_goes_to_disk_when_the_policy_says_so(redis_url: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            store_node(redis_url, disk=tmp_path, num_slots=4, write_policy="on_eviction") as host,
            client_of(host) as client,
        ):
            await put(client, chain(4))
            assert host.store.disk is not None
            assert host.store.disk.match(chain(4)) == 0
            await put(client, chain(4, seed=1))
            await until(lambda: host.store.disk is not None and host.store.disk.match(chain(4)) == 4)
            loan = await client.acquire(chain(4))
            assert len(loan.slots) == 4
            assert is_right(loan, chain(4))
            loan.release()
            await until(lambda: host.store.host.num_read == 0)
            host.store.host.check_invariants()

    run(test)


def test_a_prefix_that_is_longer_than_what_the_disk_takes_at_once_goes_down_whole(
    redis_url: str, tmp_path: Path
) -> None:
    async def test() -> None:
        names = chain(150)
        async with store_node(redis_url, disk=tmp_path, num_slots=160) as host, client_of(host) as client:
            assert await put(client, names) == 150
            await until(lambda: host.store.disk is not None and host.store.disk.match(names) == 150)
            await host.store.close()
            assert host.store.host.num_read == 0

    run(test)


def test_many_that_want_the_same_blocks_load_them_once(redis_url: str, tmp_path: Path) -> None:
    async def test() -> None:
        names = chain(8)
        async with store_node(redis_url, disk=tmp_path) as host, client_of(host) as client:
            await put(client, names)
        async with store_node(redis_url, disk=tmp_path) as host, client_of(host) as client:
            loans = await asyncio.gather(*(client.acquire(names) for _ in range(6)))
            assert [len(loan.slots) for loan in loans] == [8] * 6
            assert host.store.disk is not None
            assert host.store.disk.stats().counters.blocks_read == 8
            for loan in loans:
                loan.release()

    run(test)


@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_a_prefix_of_another_node_is_fetched_and_stays(redis_url: str, transport: str) -> None:
    async def test() -> None:
        names = chain(9)
        async with two_nodes(redis_url, transport=transport) as (far, near, remote, client):
            await put(remote, names)
            await put(client, names[:2])
            await known(client, 9)
            loan = await client.acquire(names, timeout_s=5.0)
            assert len(loan.slots) == 9
            assert is_right(loan, names)
            loan.release()
            assert (await client.lookup(names)).num_host == 9
            assert f"tandem_store_served_bytes_total {7.0 * BLOCK_BYTES}" in far.store.metrics.render().decode()
            for host in (far, near):
                await until(lambda host=host: host.store.host.num_read == 0)
                host.store.host.check_invariants()

    run(test)


def test_blocks_that_come_damaged_from_a_peer_are_a_miss(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.store_host.make_transport", corrupting(index=2))

    async def test() -> None:
        names = chain(5)
        async with two_nodes(redis_url) as (_, near, remote, client):
            await put(remote, names)
            await known(client, 5)
            loan = await client.acquire(names, timeout_s=5.0)
            assert len(loan.slots) == 2
            assert is_right(loan, names)
            loan.release()
            page = near.store.metrics.render().decode()
            assert 'tandem_store_damaged_blocks_total{tier="remote"} 1.0' in page
            await until(lambda: near.store.host.num_read == 0)
            near.store.host.check_invariants()

    run(test)


def corrupting(index: int) -> Any:
    """Makes transports that damage the message of one block."""
    from kv_transfer.transports import make_transport

    def make(name: Any, **arguments: Any) -> FaultyTransport:
        inner = make_transport(name, **arguments)
        return FaultyTransport(inner, lambda header, _: Fault.CORRUPT if header.first_block == index else Fault.NONE)

    return make


def test_a_peer_that_does_not_send_in_time_is_a_miss_and_nothing_is_written_later(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FaultyTransport] = []

    def make(name: Any, **arguments: Any) -> FaultyTransport:
        from kv_transfer.transports import make_transport

        made.append(FaultyTransport(make_transport(name, **arguments), lambda *_: Fault.DELAY))
        return made[-1]

    monkeypatch.setattr("cluster.store_host.make_transport", make)

    async def test() -> None:
        names = chain(3)
        async with two_nodes(redis_url, fetch_timeout_s=0.3) as (far, near, remote, client):
            await put(remote, names)
            await known(client, 3)
            loan = await client.acquire(names, timeout_s=5.0)
            assert loan.slots == ()
            await until(lambda: near.store.host.num_reserved == 0 and far.store.host.num_read == 0)
            for transport in made:
                transport.release()
            assert (await client.lookup(names)).num_remote == 0  # it is left alone for a while
            assert await put(client, chain(5, seed=1)) == 5
            near.store.host.check_invariants()

    run(test)


def test_a_fetch_with_a_code_of_another_cluster_is_refused(redis_url: str) -> None:
    from kv_transfer.block_claims import FetchClaims, check_fetch, fetch_code
    from tandem.errors import TicketRefused
    from tandem.secret import ClusterKey
    from tandem.types import Epoch, HandoffId, WorkerId
    from tests.factories import CLUSTER_KEY

    fetch = FetchClaims(
        transfer_id=HandoffId("0" * 32),
        source=WorkerId("a"),
        source_epoch=Epoch(1),
        destination=WorkerId("b"),
        destination_epoch=Epoch(2),
        expires_s=1.0,
        address=b"x",
        names=b"n" * 16,
        first=0,
    )
    check_fetch(CLUSTER_KEY, fetch, fetch_code(CLUSTER_KEY, fetch))
    with pytest.raises(TicketRefused):
        check_fetch(CLUSTER_KEY, fetch, fetch_code(ClusterKey(b"other" * 8), fetch))
