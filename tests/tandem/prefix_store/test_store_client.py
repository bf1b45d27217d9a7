"""Workers and their node's store, over real gRPC and shared memory."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from tandem.errors import IncompatiblePeer, StoreError
from tandem.prefix_store.client import StoreClient, at
from tandem.prefix_store.memory_socket import receive_memory
from tandem.prefix_store.slab import block_digest
from tandem.secret import ClusterKey
from tests.store_nodes import (
    BLOCK_BYTES,
    NUM_LAYERS,
    chain,
    client_of,
    fill,
    identity,
    is_right,
    payload,
    put,
    run,
    store_node,
    until,
)


def test_what_one_worker_puts_another_finds_and_reads(redis_url: str) -> None:
    async def test() -> None:
        names = chain(5)
        async with store_node(redis_url) as host, client_of(host, "a") as one, client_of(host, "b") as other:
            assert await put(one, names) == 5
            assert (await other.lookup(chain(7))).num_host == 5
            loan = await other.acquire(chain(7))
            assert len(loan.slots) == 5
            assert is_right(loan, names)
            assert loan.intact()
            loan.release()
            host.store.host.check_invariants()

    run(test)


def test_a_layer_is_a_slice_of_its_block(redis_url: str) -> None:
    async def test() -> None:
        names = chain(1)
        async with store_node(redis_url) as host, client_of(host) as client:
            grant = await client.put(names)
            layers = payload(names[0]).view(NUM_LAYERS, BLOCK_BYTES // NUM_LAYERS)
            for layer in range(NUM_LAYERS):
                grant.layer(0, layer).copy_(layers[layer])
            assert await grant.commit([block_digest(grant.block(0))]) == 1
            loan = await client.acquire(names)
            assert torch.equal(loan.layer(0, 1), layers[1])
            loan.release()

    run(test)


def test_granted_blocks_are_not_found_before_they_are_committed(redis_url: str) -> None:
    async def test() -> None:
        names = chain(3)
        async with store_node(redis_url) as host, client_of(host) as client:
            grant = await client.put(names)
            assert (await client.lookup(names)).num_host == 0
            assert (await client.acquire(names)).slots == ()
            assert (await client.put(names)).slots == ()
            assert await grant.commit(fill(grant, names)) == 3
            assert (await client.lookup(names)).num_host == 3

    run(test)


def test_only_missing_blocks_are_granted_and_none_after_a_hole(redis_url: str) -> None:
    async def test() -> None:
        names = chain(6)
        async with store_node(redis_url) as host, client_of(host) as client:
            assert (await client.put(names, first=2)).slots == ()
            await put(client, names[:3])
            grant = await client.put(names, first=1)
            assert (grant.first, len(grant.slots)) == (3, 3)
            assert await grant.commit(fill(grant, names)[:2]) == 2
            assert (await client.lookup(names)).num_host == 5

    run(test)


def test_bytes_that_are_not_those_of_their_digest_are_not_taken(redis_url: str) -> None:
    async def test() -> None:
        names = chain(4)
        async with store_node(redis_url) as host, client_of(host) as client:
            grant = await client.put(names)
            digests = fill(grant, names)
            grant.block(2)[7] ^= 1
            assert await grant.commit(digests) == 2
            assert (await client.lookup(names)).num_host == 2
            host.store.host.check_invariants()

    run(test)


def test_a_block_that_is_damaged_later_is_a_miss_and_goes(redis_url: str) -> None:
    async def test() -> None:
        names = chain(4)
        async with store_node(redis_url, check="read") as host, client_of(host) as client:
            await put(client, names)
            loan = await client.acquire(names)
            loan.block(2)[0] ^= 1
            loan.release()
            again = await client.acquire(names)
            assert len(again.slots) == 2
            assert (await client.lookup(names)).num_host == 2
            again.release()
            await until(lambda: host.store.host.num_read == 0)
            host.store.host.check_invariants()

    run(test)


def test_verify_finds_and_removes_what_is_damaged(redis_url: str) -> None:
    async def test() -> None:
        names = chain(4)
        async with store_node(redis_url) as host, client_of(host) as client:
            await put(client, names)
            loan = await client.acquire(names)
            loan.block(3)[0] ^= 1
            assert await client.verify() == (4, 1)
            assert (await client.lookup(names)).num_host == 3
            loan.release()

    run(test)


def test_a_store_full_of_blocks_that_are_read_grants_nothing(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url, num_slots=4) as host, client_of(host) as client:
            await put(client, chain(4))
            loan = await client.acquire(chain(4))
            assert (await client.put(chain(2, seed=1))).slots == ()
            loan.release()
            await until(lambda: host.store.host.num_read == 0)
            assert await put(client, chain(2, seed=1)) == 2
            host.store.host.check_invariants()

    run(test)


def test_pinned_blocks_stay_and_survive_a_clear(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url, num_slots=4) as host, client_of(host) as client:
            await put(client, chain(3))
            assert await client.pin(chain(2)) == 2
            await put(client, chain(4, seed=1))
            assert (await client.lookup(chain(3))).num_host == 2
            assert await client.clear() == 2
            assert (await client.lookup(chain(3))).num_host == 2
            assert await client.unpin(chain(3)) == 2
            assert await client.clear() == 2
            assert await client.list_hottest() == []

    run(test)


def test_a_tenant_stays_within_its_quota_and_evicts_only_its_own(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url, tenant_quotas={"small": 2}) as host, client_of(host) as client:
            await put(client, chain(5), tenant="large")
            assert await put(client, chain(4, seed=1), tenant="small") == 2
            assert await put(client, chain(1, seed=2), tenant="small") == 1
            assert (await client.lookup(chain(4, seed=1))).num_host == 1
            assert (await client.lookup(chain(5))).num_host == 5

    run(test)


def test_the_most_used_blocks_are_listed_first(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url) as host, client_of(host) as client:
            await put(client, chain(2), tenant="t")
            await put(client, chain(1, seed=1))
            for _ in range(3):
                (await client.acquire(chain(1, seed=1))).release()
            (await client.acquire(chain(1))).release()
            blocks = await client.list_hottest(2)
            assert [(b.name, b.num_uses, b.tenant) for b in blocks] == [
                (chain(1, seed=1)[0], 3, ""),
                (chain(1)[0], 1, "t"),
            ]

    run(test)


def test_a_client_of_another_model_is_refused(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url) as host:
            with pytest.raises(IncompatiblePeer, match="other"):
                async with client_of(host, fingerprint="other"):
                    pass
            with pytest.raises(IncompatiblePeer):
                async with client_of(host, block_bytes=4096):
                    pass

    run(test)


def test_a_store_that_is_not_there_has_nothing_at_once(redis_url: str) -> None:
    async def test() -> None:
        async def nowhere() -> str:
            return ""

        async with client_of(nowhere, timeout_s=0.05) as client:
            assert not client.is_attached
            assert (await client.lookup(chain(3))).num_remote == 0
            loan = await client.acquire(chain(3))
            loan.release()
            assert loan.slots == ()
            assert loan.intact()
            grant = await client.put(chain(3))
            assert grant.slots == ()
            assert await grant.commit([]) == 0
            assert await client.stats() is None

    run(test)


def test_a_client_with_the_key_of_another_cluster_is_not_let_in(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url) as host:
            key = ClusterKey(b"another " * 4)
            client = await StoreClient.attach(at(host.record.address), key=key, identity=identity(), timeout_s=0.3)
            assert not client.is_attached
            assert host.service.sample().num_clients == 0
            await client.close()

    run(test)


def test_the_memory_is_given_to_attached_clients_only(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url) as host, client_of(host) as client:
            assert client.is_attached
            address = host.service.memory_address
            with pytest.raises(StoreError):
                await asyncio.to_thread(receive_memory, address, "0" * 32, timeout_s=5.0)

    run(test)


def test_loans_are_released_from_any_thread_and_once(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url) as host, client_of(host) as client:
            await put(client, chain(3))
            loan = await client.acquire(chain(3))
            other = await client.acquire(chain(3))
            threads = [threading.Thread(target=loan.release) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            await until(lambda: host.service.sample().num_loans == 1)
            assert host.store.host.num_read == 3
            other.release()
            await until(lambda: host.store.host.num_read == 0)

    run(test)


def test_what_a_client_holds_ends_with_it(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url) as host, client_of(host, "stays") as other:
            async with client_of(host, "goes") as client:
                await put(client, chain(3))
                await client.acquire(chain(3))
                grant = await client.put(chain(2, seed=1))
                assert host.store.host.num_read == 3
            await until(lambda: host.store.host.num_read == 0)
            assert host.store.host.num_reserved == 2  # it may still be written
            grant.cancel()
            await until(lambda: host.store.host.num_reserved == 0)
            assert (await other.lookup(chain(3))).num_host == 3
            host.store.host.check_invariants()

    run(test)


def test_statistics_say_what_happened(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url) as host, client_of(host) as client:
            await put(client, chain(3))
            loan = await client.acquire(chain(5))
            stats = await client.stats()
            assert stats is not None
            tier, remote = stats.tiers
            assert (tier.tier, remote.tier, remote.num_blocks) == ("host", "remote", 0)
            assert (tier.tier, tier.num_blocks, tier.num_hits, tier.num_misses) == ("host", 3, 3, 2)
            assert (stats.num_clients, stats.num_loans, stats.num_grants) == (1, 1, 0)
            page = host.store.metrics.render().decode()
            assert 'tandem_store_used_blocks{tier="host"} 3.0' in page
            assert f'tandem_store_written_bytes_total{{tier="host"}} {3.0 * BLOCK_BYTES}' in page
            loan.release()

    run(test)
