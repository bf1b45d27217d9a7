"""Who is in the cluster: workers' records in Redis, kept alive by their own heartbeats.

Owns the key layout and the lease arithmetic; decides nothing about what to do with a worker that left. A record
lives as long as its owner renews it, so a lost Redis loses nothing: owners write their records again.

Keys (prefix `tandem:{cluster}:`): `epoch` (counter), `worker:{id}` (JSON, TTL), channel `workers` (a worker's id is
published whenever its record appears, changes state or goes). Desired pool sizes are `tandem/pool_state.py`'s.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from tandem.redis_access import connect_redis
from tandem.types import Epoch, Role, WorkerId

logger = logging.getLogger(__name__)

WorkerState = Literal["ready", "draining"]

_NEXT_EPOCH = """
local time = redis.call('TIME')
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local next = math.max(last + 1, time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', KEYS[1], string.format('%.0f', next))
return next
"""
"""The server's clock in milliseconds, or one more than the last epoch if that is later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoad:
    """What a worker last said of itself; sent with every heartbeat."""

    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """One registered worker. `fingerprint` is `tandem.model.spec.fingerprint`: only equal ones may be paired."""

    worker_id: WorkerId
    role: Role
    address: str
    epoch: Epoch
    fingerprint: str
    model: str
    max_context_tokens: int
    num_blocks: int
    block_size: int
    transport: str
    pid: int
    model_context_tokens: int = 0
    """What the model itself could take: more than `max_context_tokens` where the worker's blocks hold less."""
    metrics_url: str = ""
    generation: int = 0
    node: str = ""
    store_node: str = ""
    """The node whose prefix store the worker uses."""
    state: WorkerState = "ready"
    load: WorkerLoad = WorkerLoad()

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerRecord:
        """Inverse of `to_json`; fields of a later version are passed over. Raises ValueError for anything else."""
        try:
            values = json.loads(text)
            load = WorkerLoad(**_known(WorkerLoad, values["load"]))
            return cls(**{**_known(cls, values), "role": Role(values["role"]), "load": load})
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"not a worker's record: {exc!r}") from exc


def _known(cls: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def _read(key: str | bytes, text: str | bytes) -> WorkerRecord | None:
    try:
        return WorkerRecord.from_json(text)
    except ValueError as exc:
        logger.warning("passed over %r in Redis: %s", key, exc)
        return None


class Registry:
    """A client of the registry; one per process. Methods raise `redis.RedisError` when Redis is away."""

    def __init__(self, redis_url: str, *, cluster: str, ttl_s: float) -> None:
        self._redis = connect_redis(redis_url)
        self._prefix = f"tandem:{cluster}:"
        self._ttl_ms = int(ttl_s * 1000)

    async def next_epoch(self) -> Epoch:
        """A number larger than any given before in this cluster, also by a Redis that has lost its memory since."""
        return Epoch(int(await self._redis.eval(_NEXT_EPOCH, 1, self._prefix + "epoch")))

    async def put(self, record: WorkerRecord) -> None:
        """Writes or renews a record for ttl_s, and tells watchers when it is new or changed state."""
        key = f"{self._prefix}worker:{record.worker_id}"
        old: bytes | None = await self._redis.set(key, record.to_json(), px=self._ttl_ms, get=True)  # type: ignore[assignment]
        before = _read(key, old) if isinstance(old, str | bytes) else None
        if before is None or before.state != record.state:
            await self._redis.publish(self._prefix + "workers", record.worker_id)

    async def remove(self, worker_id: WorkerId) -> None:
        """Takes a worker out at once."""
        await self._redis.delete(f"{self._prefix}worker:{worker_id}")
        await self._redis.publish(self._prefix + "workers", worker_id)

    async def workers(self) -> list[WorkerRecord]:
        """All live records, by id. What cannot be read is logged and passed over."""
        keys = [key async for key in self._redis.scan_iter(match=self._prefix + "worker:*", count=1000)]
        values = await self._redis.mget(keys) if keys else []
        records = [_read(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
        return sorted((record for record in records if record is not None), key=lambda r: r.worker_id)

    async def changes(self) -> AsyncIterator[None]:
        """Yields whenever some record appeared, changed state or was removed; expiry is silent, so also poll."""
        async with self._redis.pubsub() as pubsub:
            await pubsub.subscribe(self._prefix + "workers")
            yield
            async for message in pubsub.listen():
                if message["type"] == "message":
                    yield

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()
