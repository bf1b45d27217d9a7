"""Stores and workers that are killed or stand still, as real processes."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from cluster.store_host import StoreHost
from cluster.store_process import StoreProcess
from kv_transfer.transport import MessageHeader
from tandem.errors import TransportError
from tandem.key_source import KEY_VARIABLE
from tandem.prefix_store.client import StoreClient
from tandem.prefix_store.registry import StoreRegistry
from tests.conftest import segments
from tests.factories import CLUSTER_KEY
from tests.store_nodes import CLUSTER, at, chain, client_of, fill, is_right, node_settings, put, run, store_node, until
from tests.store_processes import Forked, stop_forks


@pytest.fixture(autouse=True, scope="module")
def no_forks_are_left() -> Iterator[None]:
    yield
    stop_forks()


def test_workers_go_on_without_a_killed_store_and_have_its_disk_when_it_is_back(redis_url: str, tmp_path: Path) -> None:
    async def test() -> None:
        names, more = chain(8), chain(3, seed=1)
        before = segments()
        registry = StoreRegistry(redis_url, cluster=CLUSTER, ttl_s=1.0)
        with Forked("store", node_settings(redis_url, disk=tmp_path).to_json(), "8") as store:
            await asyncio.to_thread(store.read)
            async with client_of(registry.locate("n1")) as client:
                await until(lambda: on_disk(client, 8))
                loan, grant = await client.acquire(names), await client.put(more)
                assert (len(loan.slots), len(grant.slots)) == (8, 3)
                store.signal(signal.SIGKILL)
                await until(lambda: not client.is_attached)
                assert (await client.lookup(names)).num_remote == 0
                assert (await client.put(more)).slots == ()
                assert segments() == before
                assert is_right(loan, names)
                assert loan.intact()
                assert await grant.commit(fill(grant, more)) == 0
                loan.release()
                async with store_node(redis_url, disk=tmp_path) as host:
                    assert await client.wait_attached(10.0)
                    found = await client.lookup(names)
                    assert (found.num_host, found.num_disk) == (0, 8)
                    loan = await client.acquire(names)
                    assert len(loan.slots) == 8
                    assert is_right(loan, names)
                    loan.release()
                    await until(lambda: host.store.host.num_read == 0)
        await registry.close()

    run(test)


def test_a_store_runs_as_a_process_of_its_own(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, CLUSTER_KEY.to_hex())

    async def test() -> None:
        registry = StoreRegistry(redis_url, cluster=CLUSTER, ttl_s=1.0)
        process = StoreProcess(node_settings(redis_url, "alone", disk=tmp_path / "disk"), log=tmp_path / "log")
        record = await process.start()
        try:
            assert await registry.get("alone") == record
            assert process.pid == record.pid
            async with client_of(registry.locate("alone")) as client:
                assert await put(client, chain(4)) == 4
        finally:
            assert await process.stop(timeout_s=10.0)
        assert await registry.get("alone") is None
        await registry.close()

    run(test)


async def on_disk(client: StoreClient, num_blocks: int) -> bool:
    stats = await client.stats()
    return stats is not None and {t.tier: t.num_blocks for t in stats.tiers}["disk"] == num_blocks


def test_a_killed_worker_leaves_nothing_held(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url) as host, client_of(host) as client:
            await put(client, chain(3))
            with Forked("worker", host.record.address) as worker:
                assert await asyncio.to_thread(worker.read)
                assert await asyncio.to_thread(worker.ask, "hold", 3) == (3, 2)
                assert (host.store.host.num_read, host.store.host.num_reserved) == (3, 2)
                worker.signal(signal.SIGKILL)
                await until(lambda: host.store.host.num_read == host.store.host.num_reserved == 0)
            assert (await client.lookup(chain(3))).num_host == 3
            host.store.host.check_invariants()

    run(test)


def test_a_worker_that_stood_still_finds_its_loan_void_and_has_written_over_nobody(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url, num_slots=6, lease_s=0.4) as host, client_of(host) as client:
            await put(client, chain(3))
            with Forked("worker", host.record.address) as worker:
                assert await asyncio.to_thread(worker.read)
                assert await asyncio.to_thread(worker.ask, "hold", 3) == (3, 2)
                worker.signal(signal.SIGSTOP)
                await until(lambda: host.store.host.num_read == 0)
                assert host.store.host.num_reserved == 2  # it may wake up in the middle of a copy
                names = chain(4, seed=1)
                assert await put(client, names) == 4
                worker.signal(signal.SIGCONT)
                assert not await asyncio.to_thread(worker.ask, "intact")
                assert await asyncio.to_thread(worker.ask, "commit") == 0
                await until(lambda: host.store.host.num_reserved == 0)
                assert await asyncio.to_thread(worker.ask, "lookup", 3) == 0
            loan = await client.acquire(names)
            assert len(loan.slots) == 4
            assert is_right(loan, names)
            loan.release()

    run(test)


def test_a_store_that_stands_still_costs_one_deadline_and_is_used_again_when_it_goes_on(redis_url: str) -> None:
    async def test() -> None:
        names = chain(4)
        with Forked("store", node_settings(redis_url, lease_s=5.0).to_json(), "4") as store:
            address = await asyncio.to_thread(store.read)
            async with client_of(at(address), timeout_s=2.0) as client:
                assert (await client.lookup(names)).num_host == 4
                store.signal(signal.SIGSTOP)
                assert (await client.acquire(names, timeout_s=0.1)).slots == ()
                calls = [client.lookup(names), client.put(chain(2, seed=1)), client.acquire(names)]
                async with asyncio.timeout(1.0):  # none of them waits for its own deadline
                    await asyncio.gather(*calls)
                assert client.num_failures == 1
                store.signal(signal.SIGCONT)

                async def is_back() -> bool:
                    return (await client.lookup(names)).num_host == 4

                await until(is_back)
                loan = await client.acquire(names)
                assert is_right(loan, names)
                loan.release()

    run(test)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_a_peer_that_ends_in_the_middle_of_a_fetch_is_a_miss_in_bounded_time(
    redis_url: str, transport: str, end: signal.Signals
) -> None:
    async def test() -> None:
        names = chain(48)
        sizes = {"block_bytes": 1 << 20, "num_slots": 64, "fetch_timeout_s": 1.0, "transport": transport}
        far = node_settings(redis_url, "far", **sizes)
        with Forked("store", far.to_json(), "48") as peer:
            await asyncio.to_thread(peer.read)
            async with store_node(redis_url, "near", **sizes) as near, client_of(near, block_bytes=1 << 20) as client:

                async def is_known() -> bool:
                    return (await client.lookup(names)).num_remote == 48

                await until(is_known)
                end_with_the_third_block(near, peer, end)
                loan = await client.acquire(names, timeout_s=3.0)
                assert is_right(loan, names)  # what was under way may come whole even from a peer that stands still
                loan.release()
                await until(lambda: near.store.host.num_read == near.store.host.num_reserved == 0)
                assert await put(client, chain(2, seed=1)) == 2
                near.store.host.check_invariants()

    run(test)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone_is_a_miss_in_bounded_time_and_left_alone(redis_url: str, end: signal.Signals) -> None:
    async def test() -> None:
        names = chain(4)
        with Forked("store", node_settings(redis_url, "far").to_json(), "4") as peer:
            await asyncio.to_thread(peer.read)
            async with store_node(redis_url, "near", fetch_timeout_s=0.5) as near, client_of(near) as client:

                async def num_remote() -> int:
                    return (await client.lookup(names)).num_remote

                await until(lambda: is_equal(num_remote, 4))
                peer.signal(end)
                assert (await client.acquire(names, timeout_s=3.0)).slots == ()
                assert await num_remote() == 0
                near.store.host.check_invariants()

    run(test)


async def is_equal(value: Callable[[], Awaitable[int]], expected: int) -> bool:
    return await value() == expected


def end_with_the_third_block(near: StoreHost, peer: Forked, end: signal.Signals) -> None:
    """Ends the sending process as soon as its third block is here."""
    landed = near.remote.landed
    count = itertools.count(1)

    def hooked(header: MessageHeader, error: TransportError | None) -> None:
        landed(header, error)
        if next(count) == 3:
            peer.signal(end)

    near.remote.landed = hooked  # type: ignore[method-assign]
