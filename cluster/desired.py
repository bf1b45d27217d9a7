"""The desired state as the controller sees it: as last known while Redis is away, written back when Redis lost it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from redis.exceptions import RedisError

from cluster.scaling import Goal
from tandem.pool_state import DesiredPool, DesiredState, PoolState
from tandem.types import Role, WorkerId

logger = logging.getLogger(__name__)


class DesiredView:
    """`sizes` are for pools that nobody has sized yet."""

    def __init__(self, state: PoolState, sizes: Mapping[Role, int]) -> None:
        self._state = state
        self._pools = {role: DesiredPool(size=size) for role, size in sizes.items()}
        self._drain: frozenset[WorkerId] = frozenset()

    @property
    def sizes(self) -> dict[Role, int]:
        """Last known size of each pool."""
        return {role: pool.size for role, pool in self._pools.items()}

    def goals(self) -> dict[Role, Goal]:
        """What each pool should be, by the last word."""
        return {
            role: Goal(
                size=pool.size,
                generation=pool.generation,
                drain=frozenset(worker_id for worker_id in self._drain if worker_id.startswith(f"{role}-")),
            )
            for role, pool in self._pools.items()
        }

    async def refresh(self) -> bool:
        """Reads it again; False when Redis is away or had lost it. Raises nothing for either."""
        try:
            desired = await self._state.get()
            lost = [role for role in Role if desired.pool(role) is None]
            for role in lost:
                await self._state.initialise(role, self._pools[role].size, generation=self._pools[role].generation)
            if lost:
                desired = await self._state.get()
        except RedisError as exc:
            logger.warning("Redis is away, keeping the last known sizes: %s", exc)
            return False
        self._take(desired)
        return not lost

    def _take(self, desired: DesiredState) -> None:
        for role in Role:
            self._pools[role] = desired.pool(role) or self._pools[role]
        self._drain = desired.drain

    async def forget_drain(self, worker_id: WorkerId) -> None:
        """The order to drain a worker is carried out."""
        try:
            await self._state.drained(worker_id)
        except RedisError as exc:
            logger.warning("the order to drain %s stays, Redis is away: %s", worker_id, exc)

    async def clear(self) -> None:
        """The cluster is over: the next one starts from its configuration."""
        try:
            await self._state.clear()
        except RedisError as exc:
            logger.warning("the desired state was not cleared, Redis is away: %s", exc)
