"""Where the nodes' prefix stores are: their records in Redis, kept alive by their own heartbeats.

Keys: `tandem:{cluster}:store:{node}` (JSON, TTL). They are not workers' records, so nothing routes requests to them.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from tandem.redis_access import connect_redis

if TYPE_CHECKING:
    from tandem.prefix_store.client import Locate  # loads torch, which those who only look for stores do without

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRecord:
    """One running store. `transport_address` is hex; peers send blocks there. `owner` is its name in announcements."""

    node: str
    owner: str
    address: str
    epoch: int
    fingerprint: str
    block_bytes: int
    transport: str
    transport_address: str
    metrics_url: str
    capacity_blocks: int
    pid: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> StoreRecord:
        """Inverse of `to_json`; fields of a later version are passed over. Raises ValueError for anything else."""
        try:
            values = json.loads(text)
            names = {field.name for field in fields(cls)}
            return cls(**{name: value for name, value in values.items() if name in names})
        except (TypeError, AttributeError) as exc:
            raise ValueError(f"not a store's record: {exc!r}") from exc


def owner_of(node: str) -> str:
    """The name under which a node's store announces its blocks."""
    return f"store-{node}"


class StoreRegistry:
    """A client of the stores' records. Methods raise `redis.RedisError` when Redis is away, `locate` does not."""

    def __init__(self, redis_url: str, *, cluster: str, ttl_s: float) -> None:
        self._redis = connect_redis(redis_url)
        self._prefix = f"tandem:{cluster}:store:"
        self._ttl_ms = round(ttl_s * 1000)

    async def put(self, record: StoreRecord) -> None:
        """Writes or renews a record for ttl_s."""
        await self._redis.set(self._prefix + record.node, record.to_json(), px=self._ttl_ms)

    async def remove(self, node: str) -> None:
        """Takes a store out at once."""
        await self._redis.delete(self._prefix + node)

    async def get(self, node: str) -> StoreRecord | None:
        """The store of one node."""
        text = await self._redis.get(self._prefix + node)
        return None if text is None else self._read(node, text)

    async def stores(self) -> list[StoreRecord]:
        """All live ones, by node."""
        keys = [key async for key in self._redis.scan_iter(match=self._prefix + "*", count=1000)]
        values = await self._redis.mget(keys) if keys else []
        found = [self._read(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
        return sorted((record for record in found if record is not None), key=lambda record: record.node)

    def _read(self, key: str | bytes, text: str | bytes) -> StoreRecord | None:
        try:
            return StoreRecord.from_json(text)
        except ValueError as exc:
            logger.warning("passed over %r in Redis: %s", key, exc)
            return None

    def locate(self, node: str) -> Locate:
        """How a node's workers find its store; "" while Redis is away or no store is registered."""

        async def find() -> str:
            try:
                record = await self.get(node)
            except RedisError as exc:
                logger.debug("the store of %s is not looked up, Redis is away: %s", node, exc)
                return ""
            return "" if record is None else record.address

        return find

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()
