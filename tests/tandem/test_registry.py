"""The registry against a real embedded Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import redis

from cluster.embedded_redis import EmbeddedRedis
from tandem.registry import Registry, WorkerLoad, WorkerRecord
from tandem.types import Epoch, Role, WorkerId


def make_record(worker_id: str = "prefill-0", role: Role = Role.PREFILL) -> WorkerRecord:
    return WorkerRecord(
        worker_id=WorkerId(worker_id),
        role=role,
        address="127.0.0.1:7000",
        epoch=Epoch(3),
        fingerprint="ab" * 16,
        model="tiny",
        max_context_tokens=2048,
        num_blocks=128,
        block_size=16,
        transport="shm",
        pid=77,
        load=WorkerLoad(num_free_blocks=100, num_running=2),
    )


@asynccontextmanager
async def registries(count: int = 1, *, ttl_s: float = 5.0) -> AsyncIterator[tuple[EmbeddedRedis, list[Registry]]]:
    server = EmbeddedRedis()
    await server.start()
    clients = [Registry(server.url, cluster="test", ttl_s=ttl_s) for _ in range(count)]
    try:
        yield server, clients
    finally:
        for client in clients:
            await client.close()
        server.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def test_a_record_survives_json() -> None:
    record = make_record()
    assert WorkerRecord.from_json(record.to_json()) == record


def test_epochs_grow_over_all_clients() -> None:
    async def test() -> None:
        async with registries(2) as (_, (one, two)):
            epochs = [await one.next_epoch(), await two.next_epoch(), await one.next_epoch()]
            assert epochs == sorted(set(epochs))

    run(test)


def test_workers_are_listed_by_id_until_removed() -> None:
    async def test() -> None:
        async with registries() as (_, (registry,)):
            assert await registry.workers() == []
            records = [make_record("prefill-0"), make_record("decode-0", Role.DECODE)]
            for record in records:
                await registry.put(record)
            assert await registry.workers() == records[::-1]
            await registry.remove(WorkerId("prefill-0"))
            assert await registry.workers() == records[1:]

    run(test)


def test_a_record_that_is_not_renewed_expires() -> None:
    async def test() -> None:
        async with registries(ttl_s=0.05) as (_, (registry,)):
            await registry.put(make_record())
            await asyncio.sleep(0.1)
            assert await registry.workers() == []

    run(test)


def test_watchers_hear_of_new_changed_and_removed_workers_but_not_of_renewals() -> None:
    async def test() -> None:
        async with registries(2) as (_, (owner, watcher)):
            changes = watcher.changes()
            await anext(changes)
            record = make_record()
            await owner.put(record)
            await anext(changes)
            await owner.put(replace(record, load=WorkerLoad(num_running=5)))
            draining = replace(record, state="draining")
            await owner.put(draining)
            await anext(changes)
            assert (await watcher.workers())[0].state == "draining"
            await owner.remove(record.worker_id)
            await anext(changes)
            assert await watcher.workers() == []
            await changes.aclose()

    run(test)


@pytest.mark.slow
def test_a_watcher_survives_a_quiet_time_longer_than_the_socket_timeout() -> None:
    async def test() -> None:
        async with registries(2) as (_, (owner, watcher)):
            changes = watcher.changes()
            await anext(changes)
            waiting = asyncio.ensure_future(anext(changes))
            await asyncio.wait({waiting}, timeout=6.0)
            assert not waiting.done()
            await owner.put(make_record())
            await waiting
            await changes.aclose()

    run(test)


def test_a_lost_server_is_a_redis_error_and_its_successor_takes_records_again() -> None:
    async def test() -> None:
        async with registries() as (server, (registry,)):
            await registry.put(make_record())
            server.stop()
            with pytest.raises(redis.RedisError):
                await registry.put(make_record())
            await server.start()
            assert await registry.workers() == []
            await registry.put(make_record())
            assert await registry.workers() == [make_record()]

    run(test)


def test_two_clusters_on_one_server_do_not_see_each_other() -> None:
    async def test() -> None:
        async with registries() as (server, (registry,)):
            other = Registry(server.url, cluster="other", ttl_s=5.0)
            await registry.put(make_record())
            assert await other.workers() == []
            await other.close()

    run(test)
