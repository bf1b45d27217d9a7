"""Owners that announce and an index that follows, over a real Valkey that is stopped, emptied and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis

from cluster.embedded_redis import EmbeddedRedis
from tandem.prefix_store.announce import Announcer, AnnouncerSettings
from tandem.prefix_store.announce_keys import OwnerKeys
from tandem.prefix_store.client import StoreClient
from tandem.prefix_store.follow import PrefixIndexFollower
from tandem.types import Epoch
from tests.store_nodes import CLUSTER, chain, client_of, put, run, store_node, until


@asynccontextmanager
async def announcer_of(url: str, owner: str = "o", *, epoch: int = 1, ttl_s: float = 1.0) -> AsyncIterator[Announcer]:
    settings = AnnouncerSettings(redis_url=url, cluster=CLUSTER, ttl_s=ttl_s, period_s=0.01)
    announcer = Announcer(settings, owner=owner, epoch=Epoch(epoch))
    announcer.start()
    try:
        yield announcer
    finally:
        await announcer.close()


@asynccontextmanager
async def follower_of(url: str, *owners: str) -> AsyncIterator[PrefixIndexFollower]:
    follower = PrefixIndexFollower(url, cluster=CLUSTER)
    follower.follow(owners or ("o",))
    follower.start()
    try:
        yield follower
    finally:
        await follower.close()


def count(follower: PrefixIndexFollower, num: int, *, owner: str = "o", tier: str = "host") -> int:
    return follower.index.match(chain(num)).get(owner, {}).get(tier, 0)


def test_what_is_announced_before_and_after_the_snapshot_is_in_the_index(redis_url: str) -> None:
    async def test() -> None:
        async with announcer_of(redis_url) as announcer:
            announcer.changed("host", chain(3), ())
            async with follower_of(redis_url) as follower:
                await until(lambda: count(follower, 9) == 3)
                announcer.changed("host", chain(6)[3:], ())
                announcer.changed("disk", chain(2), ())
                await until(lambda: count(follower, 9) == 6 and count(follower, 9, tier="disk") == 2)
                announcer.changed("host", (), chain(6)[4:])
                await until(lambda: count(follower, 9) == 4)
                assert follower.num_snapshots == 1
                follower.index.check_invariants()

    run(test)


def test_an_owner_that_closes_or_falls_silent_is_gone_from_the_index(redis_url: str) -> None:
    async def test() -> None:
        async with follower_of(redis_url, "o", "silent") as follower:
            async with announcer_of(redis_url) as closes, announcer_of(redis_url, "silent", ttl_s=0.5) as silent:
                closes.changed("host", chain(3), ())
                silent.changed("host", chain(2), ())
                await until(lambda: count(follower, 3) == 3 and count(follower, 3, owner="silent") == 2)
                assert silent._task is not None
                silent._task.cancel()
                await until(lambda: count(follower, 3, owner="silent") == 0)
                assert count(follower, 3) == 3
            await until(lambda: count(follower, 3) == 0)

    run(test)


def test_a_later_incarnation_takes_the_place_of_the_one_before(redis_url: str) -> None:
    async def test() -> None:
        async with follower_of(redis_url) as follower, announcer_of(redis_url, epoch=1) as old:
            old.changed("host", chain(5), ())
            await until(lambda: count(follower, 5) == 5)
            assert old._task is not None
            old._task.cancel()
            async with announcer_of(redis_url, epoch=2) as new:
                new.changed("host", chain(2), ())
                await until(lambda: count(follower, 5) == 2)

    run(test)


def test_a_gap_in_the_numbers_brings_a_snapshot(redis_url: str) -> None:
    async def test() -> None:
        async with announcer_of(redis_url) as announcer, follower_of(redis_url) as follower:
            announcer.changed("host", chain(2), ())
            await until(lambda: count(follower, 4) == 2)
            keys = OwnerKeys(cluster=CLUSTER, owner="o")
            position = follower.index.position("o")
            assert position is not None
            with redis.Redis.from_url(redis_url) as client:  # an entry that nobody counted
                fields = {"epoch": position[0], "seq": position[1] + 7, "tier": "host", "added": b"", "removed": b""}
                client.xadd(keys.stream, fields)
            await until(lambda: follower.num_snapshots == 2)
            assert count(follower, 4) == 2

    run(test)


def test_what_is_no_announcement_under_an_owners_keys_does_not_end_the_following(redis_url: str) -> None:
    async def test() -> None:
        async with announcer_of(redis_url) as announcer, follower_of(redis_url, "o", "odd") as follower:
            keys = OwnerKeys(cluster=CLUSTER, owner="odd")
            with redis.Redis.from_url(redis_url) as client:
                client.hset(keys.meta, mapping={"epoch": "1.1", "seq": "0"})
                client.sadd(keys.tier("host"), "short")
                client.xadd(keys.stream, {"what": "else"})
                announcer.changed("host", chain(2), ())
                await until(lambda: count(follower, 4) == 2)
                client.delete(keys.meta, keys.tier("host"), keys.stream)
            announcer.changed("host", chain(3)[2:], ())
            await until(lambda: count(follower, 4) == 3)

    run(test)


def test_a_redis_that_lost_its_memory_is_told_everything_again() -> None:
    async def test() -> None:
        server = EmbeddedRedis()
        await server.start()
        try:
            async with announcer_of(server.url) as announcer, follower_of(server.url) as follower:
                announcer.changed("host", chain(3), ())
                await until(lambda: count(follower, 9) == 3)
                with redis.Redis.from_url(server.url) as client:
                    client.flushall()
                announcer.changed("host", chain(5)[3:], ())
                await until(lambda: count(follower, 9) == 5 and announcer.num_snapshots == 2)
        finally:
            server.stop()

    run(test)


def test_the_index_of_a_node_returns_by_itself_when_redis_restarts_under_load() -> None:
    async def test() -> None:
        server = EmbeddedRedis()
        await server.start()
        try:
            async with (
                store_node(server.url, "far", num_slots=64) as far,
                store_node(server.url, "near") as near,
                client_of(far) as writer,
                client_of(near) as reader,
            ):
                await put(writer, chain(4))
                loading = asyncio.create_task(put_many(writer))

                async def sees() -> bool:
                    return (await reader.lookup(chain(4))).num_remote == 4

                await until(sees)
                server.stop()
                assert await sees()  # the last view serves while Redis is away
                await server.start()
                await loading

                async def sees_all() -> bool:
                    found = [await reader.lookup(chain(2, seed)) for seed in range(1, 21)]
                    return await sees() and all(one.num_remote == 2 for one in found)

                await until(sees_all)
                assert far.store.host.num_read == 0
        finally:
            server.stop()

    run(test)


async def put_many(client: StoreClient) -> None:
    for seed in range(1, 21):
        assert await put(client, chain(2, seed)) == 2
        await asyncio.sleep(0.02)
