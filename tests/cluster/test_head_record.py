"""Where the head is, in a real Valkey."""

from __future__ import annotations

import asyncio

from cluster.embedded_redis import EmbeddedRedis
from cluster.head_record import HeadRecord, HeadRecords


def test_nodes_find_the_head_and_hear_of_the_end() -> None:
    async def scenario() -> None:
        redis = EmbeddedRedis()
        await redis.start()
        head = HeadRecords(redis.url, cluster="one")
        node, stranger = (HeadRecords(redis.url, cluster=cluster) for cluster in ("one", "two"))
        try:
            assert await node.get() is None
            record = HeadRecord(address="127.0.0.2:4000", token="secret")
            await head.put(record)
            assert await node.get() == record
            assert record.port == 4000
            assert await stranger.get() is None

            endings = node.endings()
            waiting = asyncio.ensure_future(anext(endings))
            async with asyncio.timeout(10):
                while not waiting.done():
                    await head.end()
                    await asyncio.sleep(0.05)
            await endings.aclose()  # type: ignore[attr-defined]
            assert await node.get() is None
        finally:
            await asyncio.gather(head.close(), node.close(), stranger.close())
            redis.stop()

    asyncio.run(scenario())
