"""Where the head of a cluster is, and the token of its Ray: kept in the cluster's Redis, read by nodes that join.

Whoever can read this Redis can run code on the nodes, as whoever can write it decides what runs: guard it alike.

Keys (prefix `tandem:{cluster}:`): `head` (JSON), channel `head` (published when it changes or the cluster ends).
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

from cluster.ray_environment import TOKEN_VARIABLE, prepare_environment
from tandem.redis_access import connect_redis

_ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadRecord:
    """`address` is host:port of Ray's GCS. It and the token are the same after a head is lost and started again."""

    address: str
    token: str

    @property
    def port(self) -> int:
        """The port in the address."""
        return int(self.address.rpartition(":")[2])


class HeadRecords:
    """A client; one per process. Methods raise `redis.RedisError` when Redis is away."""

    def __init__(self, redis_url: str, *, cluster: str) -> None:
        self._redis = connect_redis(redis_url, decode_responses=True)
        self._key = f"tandem:{cluster}:head"

    async def get(self) -> HeadRecord | None:
        """The head that runs, or was lost; None when there is none, or it has ended the cluster."""
        text = await self._redis.get(self._key)
        return None if text is None else HeadRecord(**json.loads(text))

    async def put(self, record: HeadRecord) -> None:
        """A head runs."""
        await self._redis.set(self._key, json.dumps(asdict(record)))
        await self._redis.publish(self._key, "up")

    async def end(self) -> None:
        """The head ends the cluster: its nodes are to end too."""
        await self._redis.delete(self._key)
        await self._redis.publish(self._key, _ENDED)

    async def endings(self) -> AsyncIterator[None]:
        """Yields when the cluster is ended. What was said before the subscription stands is not heard."""
        async with self._redis.pubsub() as pubsub:
            await pubsub.subscribe(self._key)
            async for message in pubsub.listen():
                if message["type"] == "message" and message["data"] == _ENDED:
                    yield

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()


async def adopt_token(redis_url: str, *, cluster: str) -> None:
    """Gives this process the token of the head in Redis, if there is one; what the environment has wins.

    For processes beside a Ray that somebody else may have started. Raises RedisError.
    """
    if os.environ.get(TOKEN_VARIABLE):
        return
    records = HeadRecords(redis_url, cluster=cluster)
    try:
        record = await records.get()
    finally:
        await records.close()
    if record is not None:
        prepare_environment(token=record.token)
