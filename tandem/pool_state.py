"""What the pools should look like: desired sizes, restart generations and drains, as state in Redis.

Anyone may write it (an admin call, later a scaling policy); the controller alone acts on it. It is lost with an
embedded Redis that loses its memory, and the controller then writes back what it last knew.

Keys (prefix `tandem:{cluster}:`): `pool:{role}` (hash: size, generation), `drain` (set of worker ids to take out),
`controller` (lease of the one acting controller, TTL), `seen` (JSON: the workers that it looks after, TTL),
`sizes_file` (JSON: what the sizes file said last), channel `pools` (published with every change of what is wanted).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tandem.redis_access import connect_redis
from tandem.types import Role, WorkerId

MAX_POOL_SIZE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredPool:
    """`size` workers, none of them started before `generation`."""

    size: int
    generation: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredState:
    """Both pools, and the workers that are to be taken out. A pool that nobody has sized yet is None."""

    prefill: DesiredPool | None
    decode: DesiredPool | None
    drain: frozenset[WorkerId]

    def pool(self, role: Role) -> DesiredPool | None:
        """The pool of a role."""
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSizes:
    """What a file with sizes says. `generation` grows with each version of it; 0 where it has none."""

    sizes: Mapping[Role, int]
    generation: int = 0


SeenState = Literal["starting", "ready", "draining", "lost", "failed"]
"""As `cluster.scaling.WorkerState`."""
SEEN_TTL_S = 30.0
"""How long what a controller saw counts when none says anything more: longer than its successor takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenWorker:
    """A worker as the acting controller sees it, whether it is registered or not."""

    worker_id: WorkerId
    role: Role
    state: SeenState
    generation: int = 0
    waits_for: str = ""
    """Why no node has room for it; empty for others."""


class PoolState:
    """A client of the desired state; one per process. Methods raise `redis.RedisError` when Redis is away."""

    def __init__(self, redis_url: str, *, cluster: str) -> None:
        self._redis = connect_redis(redis_url, decode_responses=True)
        self._prefix = f"tandem:{cluster}:"

    async def get(self) -> DesiredState:
        """All of it."""
        return DesiredState(
            prefill=await self._pool(Role.PREFILL),
            decode=await self._pool(Role.DECODE),
            drain=frozenset(WorkerId(str(w)) for w in await self._redis.smembers(self._prefix + "drain")),
        )

    async def _pool(self, role: Role) -> DesiredPool | None:
        values = await self._redis.hgetall(f"{self._prefix}pool:{role}")
        if "size" not in values:
            return None
        return DesiredPool(size=int(values["size"]), generation=int(values.get("generation", 0)))

    async def set_size(self, role: Role, size: int) -> None:
        """Asks for `size` workers (0 or more)."""
        await self._redis.hset(f"{self._prefix}pool:{role}", "size", str(size))
        await self._publish()

    async def initialise(self, role: Role, size: int, *, generation: int = 0) -> None:
        """Writes a pool that nobody has sized yet; an existing one stays as it is."""
        key = f"{self._prefix}pool:{role}"
        await self._redis.hsetnx(key, "generation", str(generation))
        if await self._redis.hsetnx(key, "size", str(size)):
            await self._publish()

    async def file_sizes(self) -> FileSizes | None:
        """What the sizes file said last, as somebody who read it wrote here."""
        text = await self._redis.get(self._prefix + "sizes_file")
        if text is None:
            return None
        values = json.loads(text)
        sizes = {Role(role): int(size) for role, size in values["sizes"].items()}
        return FileSizes(sizes=sizes, generation=int(values["generation"]))

    async def take_file_sizes(self, said: FileSizes, changed: Mapping[Role, int]) -> None:
        """Keeps what the file says now and asks for the sizes that it has changed, both or neither."""
        values = {"sizes": {str(role): size for role, size in said.sizes.items()}, "generation": said.generation}
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._prefix + "sizes_file", json.dumps(values))
            for role, size in changed.items():
                pipe.hset(f"{self._prefix}pool:{role}", "size", str(size))
            await pipe.execute()
        if changed:
            await self._publish()

    async def restart(self, role: Role) -> int:
        """Asks that every present worker of the pool be replaced; the new generation."""
        generation = int(await self._redis.hincrby(f"{self._prefix}pool:{role}", "generation", 1))
        await self._publish()
        return generation

    async def ask_drain(self, worker_id: WorkerId) -> None:
        """Asks that one worker be taken out."""
        await self._redis.sadd(self._prefix + "drain", worker_id)
        await self._publish()

    async def drained(self, worker_id: WorkerId) -> None:
        """The controller has taken it out."""
        await self._redis.srem(self._prefix + "drain", worker_id)

    async def show(self, workers: Sequence[SeenWorker]) -> None:
        """What the acting controller sees now; it counts for SEEN_TTL_S."""
        text = json.dumps([asdict(worker) for worker in workers])
        await self._redis.set(self._prefix + "seen", text, px=int(SEEN_TTL_S * 1000))

    async def seen(self) -> tuple[SeenWorker, ...]:
        """What the acting controller saw last; nothing where none has acted for a while."""
        text = await self._redis.get(self._prefix + "seen")
        return () if text is None else tuple(_seen_worker(values) for values in json.loads(text))

    async def clear(self) -> None:
        """Forgets sizes, generations, drains and what was seen: the cluster was ended on purpose."""
        pools = [f"{self._prefix}pool:{role}" for role in Role]
        await self._redis.delete(*pools, *(self._prefix + name for name in ("drain", "sizes_file", "seen")))
        await self._publish()

    async def hold_lease(self, holder: str, *, ttl_s: float) -> bool:
        """Takes or renews the controller's lease; False while another holder has it."""
        key = self._prefix + "controller"
        ttl_ms = int(ttl_s * 1000)
        if await self._redis.set(key, holder, nx=True, px=ttl_ms):
            return True
        if await self._redis.get(key) != holder:
            return False
        return bool(await self._redis.pexpire(key, ttl_ms))

    async def release_lease(self, holder: str) -> None:
        """Gives the lease back, if it is ours."""
        if await self._redis.get(self._prefix + "controller") == holder:
            await self._redis.delete(self._prefix + "controller")

    async def has_controller(self) -> bool:
        """Whether some controller holds the lease."""
        return bool(await self._redis.exists(self._prefix + "controller"))

    async def changes(self) -> AsyncIterator[None]:
        """Yields once at the start, then with every change."""
        async with self._redis.pubsub() as pubsub:
            await pubsub.subscribe(self._prefix + "pools")
            yield
            async for message in pubsub.listen():
                if message["type"] == "message":
                    yield

    async def _publish(self) -> None:
        await self._redis.publish(self._prefix + "pools", "changed")

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()


def _seen_worker(values: dict[str, Any]) -> SeenWorker:
    return SeenWorker(
        worker_id=WorkerId(values["worker_id"]),
        role=Role(values["role"]),
        state=values["state"],
        generation=int(values["generation"]),
        waits_for=str(values.get("waits_for", "")),
    )
